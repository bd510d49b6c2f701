"""Examinations of all nodes and links of a master, for `evener doctor`."""
