"""A node: what joins a master, makes ready for a run and computes there, with PyTorch or without."""
