"""A plan that was made before: does it fit the nodes that are here?"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.errors import InvalidInput
from evener.plan import Plan
from evener.run.order import Order
from evener.run.strategy import check_strategy, is_pipeline

_STAR = {"averaging": "average", "server": "sync", "asynchronous server": "async"}
"""By strategy, the agreement under which a star trains so."""


def take_plan(order: Order, plan: Plan) -> Order:
    """`order`, to perform `plan`.

    Raises:
        InvalidInput: the order says otherwise, or a star would have to perform the plan.
    """
    if plan.strategy in _STAR:
        raise InvalidInput(
            f"the plan's strategy is {plan.strategy}, which a master performs: start `evener up`, let the nodes join, "
            f"and train with --agreement {_STAR[plan.strategy]}"
        )
    said = {
        "--strategy": order.strategy != "auto",
        "--shares": order.shares != "measured",
        "--replicas": order.replicas is not None,
        "--micro-batches": order.micro_batches is not None,
        "--accumulate": order.accumulate != 1,
        "--stationary": order.stationary,
        "--batch-size": order.batch_size not in (None, plan.batch_size),
    }
    for option, is_said in said.items():
        if is_said:
            raise InvalidInput(f"{option} does not go with --plan, which says it already")
    accumulate = 1 if is_pipeline(plan.strategy) else plan.accumulate
    wanted = msgspec.structs.replace(
        order, plan=plan, strategy=plan.strategy, batch_size=plan.batch_size, accumulate=accumulate
    )
    if plan.strategy != "serial":
        check_strategy(wanted)
    return wanted


def fit_plan(plan: Plan, names: Sequence[str]) -> Plan:
    """`plan` with its ranks in the order of the nodes `names`, some of which they are.

    Raises:
        InvalidInput: a node is missing, or ranks of one replica are not neighbours in that order.
    """
    missing = [a.node for a in plan.assignments if a.node not in names]
    if missing:
        raise InvalidInput(f"the plan is for node {missing[0]}, which is not here: there are {', '.join(names)}")
    ordered = sorted(plan.assignments, key=lambda a: names.index(a.node))
    fitted = msgspec.structs.replace(
        plan, assignments=tuple(msgspec.structs.replace(a, rank=rank) for rank, a in enumerate(ordered))
    )
    ranks = [rank for row in fitted.replica_ranks for rank in row]
    if not is_pipeline(plan.strategy) and ranks != sorted(ranks):
        wanted = ", ".join(a.node for a in plan.assignments)
        raise InvalidInput(f"nodes of one replica have to be neighbours; start the nodes in the order {wanted}")
    return fitted
