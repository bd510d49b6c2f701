"""The doctor: what is wrong with a machine, or between several, said before a run hangs on it. Needs no PyTorch.

    examine (reads this machine) -> MachineFacts -> checks (pure: facts in, findings out) -> Finding

Facts can travel; whoever has those of several machines compares them by the same kind of table.
"""
