"""The master: its nodes, its runs and their results."""
