"""Hyperparameter search on unequal machines: every trial is a run of one task with other options."""
