"""Files that travel: code, data sets and checkpoints, known by the hash of their contents."""
