"""The doctor over a master: every node is looked at, and every pair of links."""
