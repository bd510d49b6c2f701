"""Data sets, uneven shares of them, and which samples each rank takes in each step.

Only `loader` and `image_folder` need PyTorch; it is imported when one of the loader's names is first asked for.
"""
