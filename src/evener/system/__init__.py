"""The process and its machine: memory, cores, signals, heartbeats, and throttling."""
