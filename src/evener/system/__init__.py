"""What this process knows of its machine: memory, cores, signals, heartbeats, and how fast it is told to be."""
