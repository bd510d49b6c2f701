"""A node: joins a master, prepares for runs and computes, with PyTorch or without."""
