"""Synchronization of replicas: the parameter server and its workers as values and state machines, without sockets or
torch.

protocol, layout          the protocol of a run, and the layout of a model's state
parameter_server, worker  messages in, answers and updates out; between them an engine that computes
weights, update           the common weights and their updates
"""
