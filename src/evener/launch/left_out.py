"""What a rank of a launcher's does when the plan leaves it out: it says so, stays, and ends as the run ends."""

from __future__ import annotations

import time

from evener.comm.signed_store import SignedStore
from evener.launch.rank_environment import RankEnvironment
from evener.launch.rank_heartbeat import has_left, published_failure, read_ending
from evener.records.errors import EvenerError, Interrupted, NodeLost
from evener.records.plan import Plan
from evener.system.heartbeat import interval


def stay(env: RankEnvironment, plan: Plan) -> None:
    """Return when the ranks of `plan`, which leaves this one out, have done their work.

    A launcher takes a rank that ends for one that has done its part, and users look at the first rank. Where Evener
    started the ranks itself, the process that did so tells the user: this returns at once.

    Raises:
        NodeLost: the run failed; says why.
        EvenerError: all ranks of the plan ended with this error.
    """
    if env.tell is None or env.store is None or env.heartbeat is None:
        return
    own = env.node.name
    reason = "; ".join(one.reason for one in plan.rejected if one.what == own) or "the plan has no part for it"
    inside = [env.names.index(one.node) for one in plan.assignments]
    env.tell(f"{own} (rank {env.rank}) is left out: {reason}; {env.names[inside[0]]} shows the run and has its results")
    while not all(has_left(env.store, rank) for rank in inside):
        if env.stop_requested:
            env.heartbeat.ask_to_stop()
        time.sleep(interval(env.patience))
    if (error := _cause(env.store, inside)) is not None:
        raise error


def _cause(store: SignedStore, ranks: list[int]) -> EvenerError | None:
    """Why a run of `ranks`, all of which have ended, failed; None if it did not. As other ranks, it names the cause."""
    if sentence := published_failure(store):
        return NodeLost(sentence)
    errors = [error for rank in ranks if (error := read_ending(store, rank)) is not None]
    return next((error for error in errors if isinstance(error, Interrupted)), errors[0] if errors else None)
