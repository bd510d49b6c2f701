"""Small programs in legal PyTorch, each run whole and divided in every way: equal, or refused in a sentence."""
