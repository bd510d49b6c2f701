"""Machines -> ClusterProfile: how fast and large every device is, what messages cost, how long a task takes on it."""

from evener.benchmark.capacity import largest_batch
from evener.benchmark.compute import measure_throughput
from evener.benchmark.device import environment, profile_device
from evener.benchmark.fit import affine
from evener.benchmark.memory import measure_bandwidth, usable_memory
from evener.benchmark.network import measure_links
from evener.benchmark.task_timing import time_task

__all__ = [
    "affine",
    "environment",
    "largest_batch",
    "measure_bandwidth",
    "measure_links",
    "measure_throughput",
    "profile_device",
    "time_task",
    "usable_memory",
]
