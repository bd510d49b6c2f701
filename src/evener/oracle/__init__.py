"""The oracle: pure functions that say who should do how much and what it will cost. No torch, no sockets, no clock."""

from evener.oracle.apportion import Worker, apportion, finish_seconds
from evener.oracle.communication import all_reduce_seconds, ring_bytes
from evener.oracle.data_parallel import Candidate, Exchange, plan_data_parallel, weights_to_workers
from evener.oracle.rebalance import Balance, Decision

__all__ = [
    "Balance",
    "Candidate",
    "Decision",
    "Exchange",
    "Worker",
    "all_reduce_seconds",
    "apportion",
    "finish_seconds",
    "plan_data_parallel",
    "ring_bytes",
    "weights_to_workers",
]
