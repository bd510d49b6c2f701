"""The doctor: what is wrong with a machine, or between several, said before a run hangs on it. Needs no PyTorch.

    examine (reads this machine) -> MachineFacts -> checks (pure: facts in, findings out) -> Finding

Facts can be sent to another machine, where a table of the same kind compares those of several machines.
"""
