"""One rank's way through a run: steps, validation, checkpoints, and what is told of them.

`settings`, which has no PyTorch in it, is imported by machines without; what is named here, when it is first asked for.
"""
