"""Measures a ClusterProfile: speed and memory of every device, cost of messages, and duration of a task."""
