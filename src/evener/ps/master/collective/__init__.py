"""Runs whose ranks work together, on a master's nodes: the master is their authority, a node has one rank."""
