"""Framed messages between a master and its nodes, over TCP or Unix sockets, encrypted and authenticated; no pickle.

A node calls `connect` and then sends and receives, blocking. The master's `Hub` serves all of them in one thread and
tells what happened as events. Both send tensors from where they lie and receive them into where they belong.
"""
