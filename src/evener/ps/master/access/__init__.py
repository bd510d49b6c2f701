"""Rights and quotas of the peers of a master, the names of its nodes, and the audit log."""
