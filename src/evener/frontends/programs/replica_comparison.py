"""The comparison of divided replicas with one process, and advice on the loss where they differ."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from evener.frontends.programs.equivalence_probe import OF_BATCH, PARTS, read_facts
from evener.frontends.programs.refusal_causes import known_cause, later_cause
from evener.training.differences import Difference, largest, off_by, statistic_size

_TOLERANCE = {True: 1e-8, False: 0.02}
"""In float64, and in the program's precision: sums in another order differ in the last digits."""
_MIN_SIZE = 1e-3
"""Smallest size of a gradient relative to the largest: a smaller one may be a sum that cancels out."""
_EXPLAINED = {True: 1e-6, False: 0.02}
"""Fraction of a gradient that parts may leave unexplained."""
_AFTER = " after a step"
_ACROSS = (
    "its loss, or a layer, looks across samples: give what it compares to evener.gather(...) first; a number "
    "that a node makes of its own loss has to be of run.mean(loss)"
)


class ReplicaComparison(msgspec.Struct, frozen=True):
    """The result of a comparison.

    Attributes:
        where: name of the tensor that differed most.
        off: difference relative to its size.
        sentence: error message; empty if the program trains the same as one process.
        is_finite: whether the gradients of one process are finite, so that the comparison is conclusive.
    """

    where: str
    off: float
    sentence: str = ""
    is_finite: bool = True


def judge(
    divided: Path, whole: Path, is_wide: bool, layers: str | None = None, names: Collection[str] | None = None
) -> ReplicaComparison:
    """Compare the results of the replicas.

    Args:
        divided: file of the replicas that divided the batch.
        whole: file of the replica with the whole batch.
        is_wide: whether they computed in float64.
        layers: strategy that divided layers; None if batches were divided.
        names: of outside tensors that were equal before the first step; None before that step.
    """
    values, expected = load_file(divided.with_suffix(".safetensors")), load_file(whole.with_suffix(".safetensors"))
    facts, (right,) = read_facts(divided), read_facts(whole)
    all_parts = {name: (values.pop(name), expected.pop(name)[0]) for name in list(values) if name.startswith(PARTS)}
    differences = list(_differences(values, expected))
    worst = max(differences, key=lambda one: one.off, default=Difference("nothing was trained", 0.0))
    tolerance = max(_TOLERANCE[is_wide], right.tolerance if is_wide else 0.0)
    if worst.off <= tolerance:
        gradients = [value for name, value in expected.items() if "/gradient/" in name]
        is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        return ReplicaComparison(where=worst.what, off=worst.off, is_finite=is_finite)
    first = next(one for one in differences if one.off > tolerance)
    batch = len(all_parts) - 1 if first.what.endswith(_AFTER) else _batch_of(first.what)
    advice = f"leave --strategy {layers} out" if layers else known_cause(facts, right, names)
    if not advice:
        advice = _advice(*all_parts[f"{PARTS}{batch}"], is_wide)
        advice = advice or later_cause(facts, right, names, is_first=batch == 0 and names is None) or _ACROSS
    return ReplicaComparison(where=first.what, off=first.off, sentence=_sentence(first, advice))


def _differences(values: dict[str, Tensor], expected: dict[str, Tensor]) -> Iterator[Difference]:
    """Yield differences of gradients first, then of the state after them where no gradient exists."""
    gradients = sorted((name for name in {**expected, **values} if "/gradient/" in name), key=_batch_of)
    most = max((largest(expected[name]) for name in gradients if name in expected), default=0.0)
    for name in gradients:
        known = expected.get(name, torch.empty(0, 0))
        off = off_by(values.get(name, torch.empty(0, 0)), known, max(largest(known), _MIN_SIZE * most))
        yield Difference(f"the gradient of {name.split('/', 2)[2]}", off)
    for name, known in expected.items():
        has_gradient = name.replace("/state/", "/gradient/") in expected
        if "/state/" in name and known.is_floating_point() and not has_gradient:
            value = values.get(name, torch.empty(0, 0))
            size = max(largest(known), 1e-6, statistic_size(name, expected))
            yield Difference(f"{name.split('/', 2)[2]}{_AFTER}", off_by(value, known, size))


def _batch_of(name: str) -> int:
    """Return the batch of a gradient, from 0, by its name."""
    number = name.rpartition(OF_BATCH)[2]
    return int(number) - 1 if OF_BATCH in name and number.isdigit() else 0


def _advice(parts: Tensor, total: Tensor, is_wide: bool) -> str:
    """Return advice on `run.prepare` if local gradients add up to the whole with some factors; else empty."""
    bound = _EXPLAINED[is_wide] * float(total.norm())
    if parts.shape[1:] == total.shape and not total.any() and not parts.any():
        return "it does not keep its gradients by loss.backward(), so Evener cannot average them over the nodes"
    if parts.shape[1:] != total.shape or not parts.isfinite().all() or not total.isfinite().all():
        return ""
    if float((parts.sum(0) - total).norm()) <= bound:
        return 'its loss seems to be a sum over samples: say count="sum" to run.prepare or BatchTask'
    factors = torch.linalg.lstsq(parts.t(), total[:, None], driver="gelsd").solution[:, 0]
    if float((factors @ parts - total).norm()) <= bound:
        return (
            "its loss seems to be a mean over something else than samples: say of what to run.prepare or BatchTask, "
            "such as count=lambda batch: number of tokens that are no padding, or sum of class weights; "
            "or, if it is divided by what a node makes of its own loss, make that of run.mean(loss)"
        )
    return ""


def _sentence(difference: Difference, advice: str) -> str:
    start = (
        f"the program would train something else than in one process: {difference.what} is {difference.off:.2g} times"
    )
    approximately = "or train approximately: `evener run --approximate`, or --no-check for a task"
    return f"{start} its size off{f'; {advice}' if advice else ''}; {approximately}"
