"""The wait of a launcher's rank that the plan leaves out, until the end of the run."""

from __future__ import annotations

import time

from evener.comm.signed_store import SignedStore
from evener.launch.rank_environment import RankEnvironment
from evener.launch.rank_heartbeat import has_left, published_failure, read_ending
from evener.records.errors import EvenerError, Interrupted, NodeLost
from evener.records.plan import Plan
from evener.system.heartbeat import interval


def stay(env: RankEnvironment, plan: Plan) -> None:
    """Wait until the ranks of `plan`, which leaves this one out, have done their work.

    A launcher considers a rank that ends as successful, and users look at the first rank. If Evener started the ranks,
    its own process informs the user, and this returns at once.

    Raises:
        NodeLost: the run failed, with its cause.
        EvenerError: all ranks of the plan ended with this error.
    """
    if env.tell is None or env.store is None or env.heartbeat is None:
        return
    name = env.node.name
    reason = "; ".join(one.reason for one in plan.rejected if one.what == name) or "the plan has no part for it"
    inside = [env.names.index(one.node) for one in plan.assignments]
    env.tell(
        f"{name} (rank {env.rank}) is left out: {reason}; {env.names[inside[0]]} shows the run and has its results"
    )
    while not all(has_left(env.store, rank) for rank in inside):
        if env.stop_requested:
            env.heartbeat.ask_to_stop()
        time.sleep(interval(env.patience))
    if (error := _cause(env.store, inside)) is not None:
        raise error


def _cause(store: SignedStore, ranks: list[int]) -> EvenerError | None:
    """Return the error of a run whose `ranks` have all ended; None without one."""
    if sentence := published_failure(store):
        return NodeLost(sentence)
    errors = [error for rank in ranks if (error := read_ending(store, rank)) is not None]
    return next((error for error in errors if isinstance(error, Interrupted)), errors[0] if errors else None)
