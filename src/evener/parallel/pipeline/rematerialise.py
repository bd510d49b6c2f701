"""Which micro-batches a stage computes a second time for backward, instead of keeping what the first pass left.

    always        every one: only what came in at the stage's boundary is kept
    except_last   those whose backward pass does not follow at once (GPipe: all but the last one)
    never         none
    auto          as few as the memory allows

A stage keeps the boundary of every micro-batch between its forward and its backward pass, and the activations inside
the stage of those that it does not recompute, and of the one that it is recomputing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Literal

from evener.oracle.schedule import Action, max_held

Rematerialise = Literal["always", "except_last", "never", "auto"]
POLICIES = ("always", "except_last", "never", "auto")


def recomputed(policy: Rematerialise, actions: Sequence[Action], most_kept: float) -> frozenset[int]:
    """Micro-batches to recompute.

    Args:
        policy: what was asked for.
        actions: of the stage, forward and backward.
        most_kept: number of micro-batches whose activations fit the memory at once; only `auto` asks.
    """
    every = frozenset(action.micro_batch for action in actions)
    if policy == "always":
        return every
    if policy == "never":
        return frozenset()
    at_once = {now.micro_batch for now, then in pairwise(actions) if then == Action("backward", now.micro_batch)}
    if policy == "except_last":
        return every - at_once
    order = [action.micro_batch for action in actions if action.kind == "backward"]
    return next((choice for choice in _choices(order, at_once) if max_held(actions, choice) <= most_kept), every)


def _choices(order: Sequence[int], at_once: Collection[int]) -> list[frozenset[int]]:
    """Sets to recompute, the smaller ones first.

    Those whose backward pass comes latest are recomputed first, as they would be held longest; or, where forward and
    backward passes alternate, some of every few in a row.
    """
    found = [frozenset(order[i:]) - frozenset(at_once) for i in range(len(order) + 1)]
    for every in range(2, len(order) + 1):
        for kept in range(1, every):
            found.append(frozenset(i for i in order if i % every >= kept) - frozenset(at_once))
    return sorted(set(found), key=len)
