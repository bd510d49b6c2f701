"""Who takes part: the processes of this machine, ranks of a run here or under torchrun, and their heartbeats."""
