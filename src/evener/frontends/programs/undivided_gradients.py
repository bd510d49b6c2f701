"""Comparison of the gradients of batches that are not divided, which nodes usually compute alike.

A program may take its batches from elsewhere than `run.prepare` or `run.share`. If every node computes all of them, the
result is that of one process. A sampler with a generator of its own draws other batches on every node, whose gradients
differ; so do those of a program that divides its batches itself. The nodes average them in both cases.

After `run.share`, or a loop that was left early, the batch stays the current one. A program that trains on it once more
may have made another batch without Evener, whose gradients then count like those of a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from evener.comm.group import Group
from evener.data.fingerprint import print_of
from evener.frontends.programs.batch_parts import OpenParts
from evener.frontends.programs.batch_tracking import BatchFollowing
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
_UNKNOWN = (
    "the program trains once more after a batch of a loader or of run.share, on tensors that functions of torch did "
    "not make from it, and nodes {first} and {other} computed different gradients, which count like those of parts of "
    "that batch: this is right only if each node made them from its part. If not, take every batch through run.share"
)


class _Observed(NamedTuple):
    """A gradient since the last update.

    Attributes:
        print: of its elements.
        norm: of it, or the sum of the norms of its parts.
        weight: sum of the weight's elements when it arrived.
        is_repeated: whether a divided batch was current, which cannot be its batch if its weight is updated now.
    """

    print: float
    norm: float
    weight: float
    is_repeated: bool


class UndividedGradients:
    """The gradients of this rank since the last update, from batches that are not divided.

    They are compared at the first updates from such batches, and at the updates 128, 256, 512 ... So are gradients of
    unknown batches while a divided batch is current that cannot be theirs: it has updated the weight already, or is
    evaluated.

    Args:
        group: the ranks.
        parts: that this rank computes now.
        following: which knows the batches of model calls.
        patience: seconds of silence after which a rank is lost.
    """

    def __init__(self, group: Group, parts: OpenParts, following: BatchFollowing, patience: float) -> None:
        self._group, self._parts, self._following, self._patience = group, parts, following, patience
        self._seen: dict[int, _Observed] = {}
        self._updates, self._are_any, self._norm = 1, False, 0.0
        self._is_told = False
        self._updated: set[int] = set()
        self._is_compared = False

    def observe(self, weight: Tensor, gradient: Tensor) -> None:
        """Note a gradient of `weight` that a `backward()` has computed on this rank."""
        is_repeated = self._parts.are_any
        if is_repeated and self._parts.are_trained and id(weight) not in self._updated:
            return
        if not is_added(weight):
            return
        self._are_any = True
        if self._updates > _EACH and self._updates & (self._updates - 1):
            return
        self._is_compared = True
        if is_repeated and not self._following.is_unknown:
            return
        gradient = gradient.detach()
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        before = self._seen.get(id(weight)) if _is_kept(weight) else None
        print_before, norm_before = (0.0, 0.0) if before is None else before[:2]
        norm = norm_before + float(as_real(values).cpu().double().norm())
        self._seen[id(weight)] = _Observed(print_before + print_of(gradient), norm, _sum_of(weight), is_repeated)

    def difference(self, weights: Iterable[Tensor], updated: Sequence[Tensor], *, may_differ: bool = False) -> str:
        """Return a sentence, once, if ranks have different gradients of `weights` since the last update; else empty.

        All ranks call this after an update.

        Args:
            weights: whose gradients the ranks average.
            updated: weights that were updated.
            may_differ: whether the program has combined rows of different ranks.
        """
        ids = set(map(id, updated))
        seen = {one: facts for one, facts in self._seen.items() if not facts.is_repeated or one in ids}
        self._updates += self._are_any
        is_compared = self._is_compared
        self._seen, self._are_any, self._is_compared = {}, False, False
        self._updated |= ids
        if not is_compared:
            return ""
        rows = np.array([(0.0, float(bool(seen))), *(seen.get(id(one), (0.0, 0.0))[:2] for one in weights)])
        table = numbers_of_ranks(self._group, _TOPIC, rows, self._patience)
        table, is_seen = table[:, 1:], table[:, 0, 1].all()  # a rank may not know what others know
        if not is_seen or not np.isfinite(table).all():
            return ""
        off = np.linalg.norm(table[:, :, 0] - table[0, :, 0], axis=1)
        self._norm = max(_FADING * self._norm, float(np.linalg.norm(table[:, :, 1], axis=1).max()))
        differing = np.flatnonzero(off > _ALIKE * self._norm)
        if not len(differing) or may_differ or self._is_told:
            return ""
        self._is_told = True
        first, other = self._group.nodes[0], self._group.nodes[differing[0]]
        is_repeated = any(one.is_repeated for one in seen.values())
        return (_UNKNOWN if is_repeated else _UNDIVIDED).format(first=first, other=other)

    def begin_batch(self) -> None:
        """Note that the program received a divided batch."""
        self._updated.clear()

    def drop_unused(self, weights: Iterable[Tensor]) -> None:
        """Forget the gradients since the last update, unless the program has changed `weights` without an optimizer."""
        if all(_sum_of(one) == self._seen[id(one)].weight for one in weights if id(one) in self._seen):
            self._seen = {}


def _is_kept(weight: Tensor) -> bool:
    """Return whether a new gradient is added to an earlier one."""
    return weight.grad is not None and (weight.grad.is_sparse or bool(weight.grad.any()))


def _sum_of(weight: Tensor) -> float:
    return float(as_real(weight.detach()).sum())
