"""Comparison of the nodes of `--agreement sync` with a single process, before the run is submitted.

    one process    a batch as a whole, and a step of the task's own optimiser
    the nodes      each a part of that batch, as a node computes it; merged, and a step made, as the master does
    equal?         loss, gradients, statistics, weights after the step

It computes with NumPy and whatever the backend computes with, so a thin task is checked without PyTorch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from evener.agreements.compression import as_bytes
from evener.agreements.layout import Flat, flat_of
from evener.agreements.messages import Answer, Lease, Push, SampleRange
from evener.agreements.threads import ThreadPool
from evener.agreements.update import Merging
from evener.agreements.weights import CommonWeights
from evener.agreements.worker import WorkerReplica
from evener.data.sampler import permutation
from evener.ps.node.engine import EngineSetup, ModelBackend, TaskEngine
from evener.ps.protocol.job import Job
from evener.records.errors import NeedsRanks, first_line, place_of
from evener.records.plan import Check
from evener.records.profile import Precision
from evener.training.array_differences import (
    ArrayDifference,
    StepArrays,
    differences,
    felt,
    gradient_difference,
    loss_difference,
)

_EXACT: Precision = "fp64"
_NUM_STEPS = {"fp64": 2}
"""By precision; else 1: the second step magnifies the rounding of the first."""
_MAX_SAMPLES = 6
"""Samples of a batch that the check divides."""
_LOSS_TOLERANCES = {"fp64": 1e-8, "fp32": 1e-3, "bf16": 0.05}
"""By precision: the relative difference of a loss that rounding explains."""
_TOLERANCES = {"fp64": 1e-8, "fp32": 0.05, "bf16": 0.5}
"""By precision: the relative difference of other values that rounding explains."""
_BUDGET_SECONDS, _DOUBLE = 10.0, 2.0
"""The check repeats in float64, which takes that many times as long, if it then ends within the budget: of processor
time, so that what is found does not depend on what else the machine does."""
_NUM_NODES = 2
_HERE: Any = (None, None, "cpu", 1.0, lambda: None)
"""Where the nodes of the check compute: no folders, this processor at full speed, nothing between local steps."""
_INSTEAD = (
    "leave --agreement out, and the nodes work together as ranks, which {ranks}; or take --agreement average or "
    "diloco, where every node makes steps of its own; or --no-check"
)


class TaskProbe(Protocol):
    """A task in one precision, as one process trains it and as nodes do."""

    @property
    def tolerance(self) -> float:
        """Relative, of values that the task rounds to narrower types than the precision's; 0 without any."""
        ...

    def backend(self) -> ModelBackend:
        """Make the backend of another node."""
        ...

    def batch_norm(self) -> str:
        """Name a layer that normalises over the batch in training; empty if there is none."""
        ...

    def off_in_parts(self, indices: NDArray[np.int64]) -> float:
        """Return the relative difference between the loss of these samples and of their parts; 0 if unknown."""
        ...

    def draws_for_all(self, indices: NDArray[np.int64], /) -> bool:
        """Return whether these samples and fewer of them draw the same numbers, such as one for a whole batch.

        What the generators of Python and NumPy draw counts as such a number: it is unknown for which samples it is.
        """
        ...

    def whole(self, batches: Sequence[NDArray[np.int64]], num_steps: int) -> list[StepArrays]:
        """Train as one process does, a step for each of `batches`; the run has `num_steps`."""
        ...

    def drawing(self) -> AbstractContextManager[Any]:
        """Return a context in which every sample draws the same random numbers."""
        ...


ProbeOf = Callable[[Precision, bool], TaskProbe]
"""Makes the probe of a precision; the second argument: whether the run computes in it, too."""


def sync_check(probe_of: ProbeOf, job: Job, initial: Flat) -> Check | None:
    """Compare a small step of two nodes with one process; None if the task does not compute on this machine.

    Args:
        probe_of: makes the task's probes.
        job: that is to be submitted.
        initial: weights.

    Raises:
        NeedsRanks: the nodes would not train like a single process; says which value differs, and the alternative.
    """
    begun, busy = time.perf_counter(), time.thread_time()
    sizes = _sizes(job.agreement.batch)
    requested: Any = job.precision
    done: list[Precision] = []
    for precision in dict.fromkeys((requested, _EXACT)):
        if done and (1 + _DOUBLE) * (time.thread_time() - busy) > _BUDGET_SECONDS:
            break
        difference = _compare(probe_of(precision, precision == requested), job, initial, precision, sizes)
        if difference is None and precision == requested:
            return None
        if difference is not None:
            done.append(precision)
            worst = difference
    return Check(
        samples=sizes,
        precisions=tuple(done),
        where=worst.what,
        off=worst.off,
        seconds=time.perf_counter() - begun,
    )


def _sizes(batch: int) -> tuple[int, int]:
    """Return sample counts of two uneven nodes, for part of a batch."""
    count = min(batch, _MAX_SAMPLES)
    return count - max(1, count // 3), max(1, count // 3)


def _compare(
    probe: TaskProbe, job: Job, initial: Flat, precision: Precision, sizes: tuple[int, int]
) -> ArrayDifference | None:
    """Return the largest difference; None if one process does not compute here. Raise NeedsRanks if too large."""
    if norm := probe.batch_norm():
        raise NeedsRanks(
            f"--agreement sync cannot train {norm} as one process does, for every node would normalise by the samples "
            "of its own alone",
            _INSTEAD.format(ranks="normalise by all samples"),
        )
    num_steps, count = _NUM_STEPS.get(precision, 1), sum(sizes)
    order = permutation(job.workload.num_samples, job.workload.seed, 0)
    rounds = [np.arange(step * count, (step + 1) * count) % len(order) for step in range(num_steps)]
    try:
        whole = probe.whole([order[positions] for positions in rounds], _steps_of(job))
        nodes = _Nodes(probe, job, initial, count)
    except Exception as error:
        if _computes(probe, order[: job.agreement.batch], _steps_of(job)):
            raise _failed(error) from error
        return None  # the nodes say what is wrong, or have what is missing here
    if not all(np.isfinite(step.loss) for step in whole):
        return None
    if probe.draws_for_all(order[rounds[0]]):
        raise NeedsRanks(
            "--agreement sync cannot train a model or a loss that draws a random number for the whole batch, such as a "
            "coin for a layer or noise for a weight, as every node would draw its own",
            "draw one for every sample, or write a BatchTask, in which all nodes draw alike; or --no-check",
        )
    before = _arrays(nodes.weights)
    divided = [nodes.step(positions, sizes) for positions in rounds]
    in_parts = probe.off_in_parts(order[rounds[0]])
    results = [ArrayDifference("the loss of a batch in parts", in_parts, is_loss=True)]
    narrow = probe.tolerance if precision == _EXACT else 0.0
    if precision == _EXACT:
        results += differences(divided, whole, before, _TOLERANCES[precision])
    else:
        results += [loss_difference(divided[0], whole[0], 1), gradient_difference(divided[0], whole[0])]
    for one in results:
        if not one.off <= max((_LOSS_TOLERANCES if one.is_loss else _TOLERANCES)[precision], narrow):
            raise _difference(one, precision, sizes)
    return max(results, key=lambda one: one.off)


class _Nodes:
    """Two nodes and their master in this process.

    Args:
        probe: of the task.
        job: that is to be submitted.
        initial: weights.
        batch: samples of a step.
    """

    def __init__(self, probe: TaskProbe, job: Job, initial: Flat, batch: int) -> None:
        backends = [probe.backend() for _ in range(_NUM_NODES)]
        layout = backends[0].layout
        plain = replace(
            job.agreement,
            batch=batch,
            push="none",
            pull="none",
            slow_link="none",
            robust="mean",
            clip_norm=felt(job.agreement.clip_norm),
        )
        setup = EngineSetup(replace(job, layout=layout, num_validation=0, agreement=plain), *_HERE)
        engines = [TaskEngine(backend, setup) for backend in backends]
        engines[0].step_seconds(0.0)  # a node measures itself first
        with probe.drawing():  # and some validate: how often a model was called may differ between nodes
            backends[0].backward(np.arange(batch) % job.workload.num_samples, 0, (0,))
        self._replicas = [WorkerReplica(engine, plain) for engine in engines]
        self._probe, self._cores = probe, ThreadPool(1)
        self._common = CommonWeights(flat_of(layout, initial.views()), plain.outer, self._cores, plain.clip_norm)
        self._merged = Flat(layout)

    @property
    def weights(self) -> Flat:
        """The common weights."""
        return self._common.weights

    def step(self, positions: NDArray[np.int64], sizes: Sequence[int]) -> StepArrays:
        """Divide a batch among the nodes, merge what they send, and make a step.

        Raises:
            NeedsRanks: a part of a batch cannot be computed.
        """
        parts = np.split(positions, np.cumsum(sizes)[:-1])
        try:
            pairs = [self._work(replica, part) for replica, part in zip(self._replicas, parts, strict=True)]
        except Exception as error:
            raise _failed(error) from error
        Merging(self._merged, [flat for _, flat in pairs], sizes, self._cores).finish()
        pushes = [push for push, _ in pairs]
        gradients = {name: array for name, array in _arrays(self._merged).items() if name in self._parameters}
        self._common.update(self._merged, frozenset.intersection(*(frozenset(push.unused) for push in pushes)))
        losses = [float("nan") if push.loss is None else push.loss for push in pushes]
        loss = sum(one * size for one, size in zip(losses, sizes, strict=True)) / sum(sizes)
        return StepArrays(loss, gradients, _arrays(self._common.weights))

    def _work(self, replica: WorkerReplica, positions: NDArray[np.int64]) -> tuple[Push, Flat]:
        """Return one node's push and its contribution, which is valid until its next work."""
        version = self._common.version
        answer = Answer(version=version, answers=version - 1 if version else None, contents="weights")
        replica.take(answer, self._common.lend())
        samples = SampleRange(epoch=0, ranges=tuple((int(position), 1) for position in positions))
        with self._probe.drawing():
            push, image = replica.work(Lease(number=version, version=version, samples=samples))
        return push, Flat(self._merged.layout, as_bytes(image))

    @property
    def _parameters(self) -> set[str]:
        return {entry.name for entry in self._merged.layout.entries if entry.kind == "parameter"}


def _computes(probe: TaskProbe, batch: NDArray[np.int64], num_steps: int) -> bool:
    """Return whether one process computes a whole batch on this machine."""
    try:
        probe.whole([batch], num_steps)
    except Exception:
        return False
    return True


def _failed(error: Exception) -> NeedsRanks:
    return NeedsRanks(
        f"--agreement sync cannot train this model{place_of(error)}: a part of a batch gives "
        f"{type(error).__name__}: {first_line(error)}",
        _INSTEAD.format(ranks="may divide layers"),
    )


def _steps_of(job: Job) -> int:
    """Return the steps of the run."""
    return (job.workload.num_epochs or 1) * -(-job.workload.num_samples // job.agreement.batch)


def _arrays(flat: Flat) -> dict[str, NDArray[Any]]:
    """Return the arrays of a state by name, as float64."""
    return {name: array.astype(np.float64) for name, array in flat.views().items()}


def _difference(difference: ArrayDifference, precision: Precision, sizes: Sequence[int]) -> NeedsRanks:
    return NeedsRanks(
        f"--agreement sync would not train like a single process: {difference.what} differs by a factor of "
        f"{difference.off:.2g} ({precision}, {'+'.join(map(str, sizes))} samples)",
        _INSTEAD.format(ranks="may divide layers"),
    )
