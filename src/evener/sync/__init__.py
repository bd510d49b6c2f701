"""How replicas agree: the parameter server and its workers as values and state machines, without sockets or torch.

Agreement, Workload          what was agreed on
Server                       messages in, answers and updates out
Replica, work                the worker's side, between an Engine and an Exchange
Layout, Flat                 a model's state in one piece of memory
save_snapshot, load_snapshot the server's state on disk
"""
