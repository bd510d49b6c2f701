"""Data sets, uneven shares of them, and which samples each rank takes in each step.

Only `loader` needs PyTorch.
"""
