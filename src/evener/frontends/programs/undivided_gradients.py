"""Comparison of the gradients of batches that are not divided, which nodes usually compute alike.

A program may take its batches from elsewhere than `run.prepare` or `run.share`. If every node computes all of them, the
result is that of one process. A sampler with a generator of its own draws other batches on every node, whose gradients
differ; so do those of a program that divides its batches itself. The nodes average them in both cases.

A divided batch stays the current one after `run.share`, and after a loop that was left early. If the program then takes
a batch from elsewhere, its gradients count like those of a part. Forked replicas notice this, as their parts of a batch
have other sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from evener.comm.group import Group
from evener.data.fingerprint import print_of
from evener.frontends.programs.batch_parts import OpenParts
from evener.frontends.programs.totals import numbers_of_ranks
from evener.parallel.gradient_sums import is_added
from evener.training.differences import as_real

_ALIKE = 2e-2
"""Largest difference of alike gradients, relative to their norm: machines round differently, as in bfloat16."""
_FADING = 0.5
"""Part of an earlier norm that still counts: at the end of training, gradients may be rounding errors."""
_EACH = 64
"""Number of first updates that are all compared."""
_TOPIC = "the gradients of a batch that is not divided"
_UNDIVIDED = (
    "no batch is divided, and nodes {first} and {other} computed different gradients, whose mean they use: this is "
    "right only if each takes its own, equally large part of every batch. If not, give the loader to run.prepare, take "
    "batches through run.share, or seed what draws them, as in torch.Generator().manual_seed(0)"
)
_OTHERS = (
    "the program trains once more while a batch of a loader or of run.share is the current one, on tensors that were "
    "not made from it, and nodes {first} and {other} computed different gradients, which count like those of parts of "
    "that batch: this is right only if each node made them from its part. If not, take every batch through run.share"
)


class _Observed(NamedTuple):
    """A gradient since the last update.

    Attributes:
        print: of its elements.
        norm: of it, or the sum of the norms of its parts.
        weight: sum of the weight's elements when it arrived.
        is_other: whether a divided batch was current, which has updated the weight already, or is evaluated.
    """

    print: float
    norm: float
    weight: float
    is_other: bool


class UndividedGradients:
    """The gradients of this rank since the last update, from batches that are not divided.

    They are compared at the first updates from such batches, and at the updates 128, 256, 512 ... If the program has
    other batches while a divided one is current, so are the gradients of further updates by it.

    Args:
        group: the ranks.
        parts: that this rank computes now.
        patience: seconds of silence after which a rank is lost.

    Attributes:
        has_others: whether the program has other batches while a divided one is current; alike on all ranks.
    """

    def __init__(self, group: Group, parts: OpenParts, patience: float) -> None:
        self._group, self._parts, self._patience = group, parts, patience
        self._seen: dict[int, _Observed] = {}
        self._updates, self._are_any, self._norm = 1, False, 0.0
        self._is_told = self.has_others = False
        self._updated: set[int] = set()

    def begin_batch(self) -> None:
        """Note that the program received a divided batch."""
        self._updated.clear()
        self._seen = {one: facts for one, facts in self._seen.items() if not facts.is_other}  # nothing was updated

    def end_update(self, weights: Iterable[Tensor]) -> None:
        """Note that an optimizer has updated `weights`."""
        self._updated.update(map(id, weights))

    def is_further(self, weights: Iterable[Tensor]) -> bool:
        """Return whether the current, divided batch cannot be that of an update of `weights`, or has updated them."""
        is_known = self._parts.are_trained and self._updated.isdisjoint(map(id, weights))
        return self._parts.are_any and not is_known

    @property
    def _is_due(self) -> bool:
        return self._updates <= _EACH or self._updates & (self._updates - 1) == 0

    def observe(self, weight: Tensor, gradient: Tensor) -> None:
        """Note a gradient of `weight` that a `backward()` has computed on this rank."""
        is_other = self._parts.are_any
        if (is_other and not (self.has_others and self.is_further([weight]))) or not is_added(weight):
            return
        self._are_any |= not is_other
        if not self._is_due:
            return
        gradient = gradient.detach()
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        before = self._seen.get(id(weight)) if _is_kept(weight) else None
        print_before, norm_before = (0.0, 0.0) if before is None else before[:2]
        norm = norm_before + float(as_real(values).cpu().double().norm())
        self._seen[id(weight)] = _Observed(print_before + print_of(gradient), norm, _sum_of(weight), is_other)

    def difference(self, weights: Iterable[Tensor], updated: Sequence[Tensor], *, may_differ: bool = False) -> str:
        """Return a sentence, once, if ranks have different gradients of `weights` since the last update; else empty.

        All ranks call this after an update.

        Args:
            weights: whose gradients the ranks average.
            updated: weights that were updated.
            may_differ: whether the program has combined rows of different ranks.
        """
        is_further, is_due = self.has_others and self.is_further(updated), self._is_due
        others = set(map(id, updated)) if is_further else set()  # those of other weights are not used
        seen = {one: facts for one, facts in self._seen.items() if not facts.is_other or one in others}
        self._seen = {}
        self._updates += self._are_any or is_further
        self._are_any = False
        if not seen and not (is_further and is_due):  # alike on all ranks, also if some have no gradient of a weight
            return ""
        rows = np.array([seen.get(id(weight), (0.0, 0.0))[:2] for weight in weights])
        table = numbers_of_ranks(self._group, _TOPIC, rows, self._patience)
        if not np.isfinite(table).all():
            return ""
        off = np.linalg.norm(table[:, :, 0] - table[0, :, 0], axis=1)
        self._norm = max(_FADING * self._norm, float(np.linalg.norm(table[:, :, 1], axis=1).max()))
        differing = np.flatnonzero(off > _ALIKE * self._norm)
        if not len(differing) or may_differ or self._is_told:
            return ""
        self._is_told = True
        first, other = self._group.nodes[0], self._group.nodes[differing[0]]
        return (_OTHERS if is_further else _UNDIVIDED).format(first=first, other=other)

    def drop_unused(self, weights: Iterable[Tensor]) -> None:
        """Forget the gradients since the last update, unless the program has changed `weights` without an optimizer."""
        if all(_sum_of(one) == self._seen[id(one)].weight for one in weights if id(one) in self._seen):
            self._seen = {}


def _is_kept(weight: Tensor) -> bool:
    """Return whether a new gradient is added to an earlier one."""
    return weight.grad is not None and (weight.grad.is_sparse or bool(weight.grad.any()))


def _sum_of(weight: Tensor) -> float:
    return float(as_real(weight.detach()).sum())
