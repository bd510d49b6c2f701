"""Framed messages between a master and its nodes, over TCP or Unix sockets, encrypted and authenticated; no pickle.

A node opens a `Connection` and then sends and receives, waiting. The master's `Server` serves all of them in one
thread; what happens comes out as events. Both send tensors from where they lie and receive them where they belong.
"""
