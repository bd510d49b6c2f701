"""Prices ways to train: seconds, bytes sent and memory of a step, from a model graph and a cluster profile. Pure."""
