"""Machines -> ClusterProfile: how fast and large every device is, what messages cost, how long a task takes on it."""
