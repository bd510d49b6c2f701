"""How replicas agree: the parameter server and its workers as values and state machines, without sockets or torch.

protocol, layout          what is agreed on, and what a model's state is
server, worker            messages in, answers and updates out; between them an engine that computes
weights, update           the common weights and how they change
"""
