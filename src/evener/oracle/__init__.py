"""Plan who does how much and predict what it costs, with pure functions: no torch, no sockets, no clock."""
