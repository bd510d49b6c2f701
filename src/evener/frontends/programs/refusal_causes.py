"""Causes of a difference from one process: outside tensors, a learning rate, a collate function."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from evener.frontends.programs.equivalence_probe import Facts
from evener.frontends.programs.unprepared_tensors import differing


def known_cause(copies: Sequence[Facts], whole: Facts, names: Collection[str] | None) -> str:
    """Describe the first difference between nodes before a batch is computed, with advice; empty without one.

    Args:
        copies: facts of all ranks' replicas, which divided batches.
        whole: facts of the replica with whole batches.
        names: of outside tensors that were equal before the first step; None before that step.
    """
    first, *others = copies
    unlike = [name for other in others for name in differing(first.outside, other.outside)]
    if names is None and unlike:
        return (
            f"`{unlike[0]}` differs between the nodes before the first step, and is in no model of run.prepare: make "
            "it after run.prepare, give it to run.prepare, too, or seed it alike on all nodes"
        )
    made = [name for name in unlike if names is not None and name in names]
    if made:
        made.sort(key=lambda name: name in first.containers)
        return _made_by_nodes(made[0], is_container=made[0] in first.containers)
    for copy in copies:
        for rate, expected in zip(copy.rates, whole.rates, strict=False):
            if not np.isclose(rate, expected, rtol=1e-6, atol=0.0):
                return (
                    f"the learning rate is {rate:g} on a node and {expected:g} in one process: do not make it from "
                    "what one node has; the size of the whole batch is run.part.total, its loss run.mean(loss)"
                )
    return ""


def later_cause(copies: Sequence[Facts], whole: Facts, names: Collection[str] | None, *, is_first: bool = False) -> str:
    """Describe the first difference that arose while batches were computed, with advice; empty without one.

    Args:
        copies: see `known_cause`.
        whole: see `known_cause`.
        names: see `known_cause`.
        is_first: whether the first batch of the program differs, which no container of earlier samples explains.
    """
    first, *others = copies
    if first.late_hooks:
        return (
            f"a hook on the gradient of `{first.late_hooks[0]}` was registered after run.prepare, and is called with "
            "the gradient of this node's samples alone: register it before run.prepare, after which it is called with "
            "that of the whole batch; or change gradients between loss.backward() and optimizer.step()"
        )
    alike = set(first.outside) if names is None else set(first.outside) & set(names)
    for other in others:
        for name in differing(first.outside_later, other.outside_later):
            if is_first and name in first.containers:
                continue
            if name in alike and name not in differing(first.outside, other.outside):
                return _made_by_nodes(name, is_container=name in first.containers)
    for number, expected in enumerate(whole.rows):
        rows = [row for copy in copies for row in (copy.rows[number] if number < len(copy.rows) else ())]
        if len(rows) == len(expected) and not np.allclose(rows, expected, rtol=1e-9, atol=0.0, equal_nan=True):
            return (
                "the samples of a part of a batch are not those of the whole: a sampler of the program's own draws "
                "another order every time, so seed it; or collate_fn mixes samples, or draws random numbers without "
                "PyTorch, so mix samples after the loader; or the program writes results of a node's own samples into "
                "the data set, so write what evener.gather(...) gives"
            )
    return ""


def alike_outside(copies: Sequence[Facts]) -> list[str]:
    """Return the names of outside tensors that are equal on all nodes."""
    first, *others = copies
    unlike = {name for other in others for name in differing(first.outside, other.outside)}
    return [name for name in first.outside if name not in unlike]


def _made_by_nodes(name: str, *, is_container: bool) -> str:
    if is_container:
        return (
            f"`{name}` keeps what a node made of its own samples in earlier steps: keep what evener.gather(...) gives "
            "of all nodes, and take the same from it on every node"
        )
    return (
        f"`{name}` is in no model of run.prepare, and every node makes another one from its own samples: make it from "
        "run.mean(...), run.sum(...) or evener.gather(...), a table also with gathered indices"
    )
