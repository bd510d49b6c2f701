"""Runs whose ranks work together, one rank per node; the master is their coordinator."""
