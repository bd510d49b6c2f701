"""Published experiments, done again: each prints its figures beside those that were published."""
