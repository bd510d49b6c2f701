"""Starts the ranks of a run, on this machine or under torchrun, and watches them: their processes and heartbeats."""
