"""Agreements (`--agreement`): the parameter server and its workers as values and state machines, without sockets or
torch.

settings, layout          the settings of an agreement, and the layout of a model's state
parameter_server, worker  messages in, answers and updates out; between them an engine that computes
schedules, aggregator     when the weights change, and from what
weights, update, robust   the common weights and their updates
data_assigner             who has which samples

docs/adding-an-agreement.md lists what a new one needs.
"""
