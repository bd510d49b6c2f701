"""A plan that was made before: does it go with what is asked for, and does it fit the nodes that are here?"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.errors import InvalidInput
from evener.plan import Plan
from evener.run.config import RunConfig, is_pipeline, strategy_conflict
from evener.schema import read_noun

_AGREEMENTS = {"averaging": "average", "server": "sync", "asynchronous server": "async"}
"""By strategy, the agreement under which a master's nodes train so."""


def read_plan(config: RunConfig) -> Plan | None:
    """The plan to perform; None if there is none.

    Raises:
        MissingFile, InvalidFile: it cannot be read.
        InvalidInput: what is asked for says otherwise, or a master would have to perform the plan.
    """
    if config.plan is None:
        return None
    plan = read_noun(config.plan, Plan)
    if plan.strategy in _AGREEMENTS:
        raise InvalidInput(
            f"the plan's strategy is {plan.strategy}, which a master performs: start `evener up`, let the nodes join, "
            f"and train with --agreement {_AGREEMENTS[plan.strategy]}"
        )
    if config.batch_size not in (None, plan.batch_size):
        raise InvalidInput("--batch-size does not go with --plan, which says it already")
    if sentence := strategy_conflict(config, plan.strategy):
        raise InvalidInput(sentence)
    return plan


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
