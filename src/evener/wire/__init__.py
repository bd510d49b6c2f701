"""Framed messages between a master and its nodes, over TCP or Unix sockets, encrypted and authenticated; no pickle.

A node opens a `Connection` with blocking sends and receives. The master's `Server` serves all nodes in one thread, and
returns events. Both send tensors from their memory and receive them in place.
"""
