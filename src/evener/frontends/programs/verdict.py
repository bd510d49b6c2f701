"""What a rehearsal came to: whether ranks train what one process trains, and if not, what the loss seems to be."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from evener.frontends.programs.compared_copy import OF_BATCH, PARTS, read_facts
from evener.frontends.programs.refusal_causes import known_cause, later_cause
from evener.training.differences import Difference, largest, off_by, statistic_size

_TOLERANCE = {True: 1e-8, False: 0.02}
"""In float64, and in the program's own precision: sums in another order differ in the last digits."""
_LEAST = 1e-3
"""Of the largest gradient: a smaller one is judged as if it had this size, as it may be a sum that cancels out."""
_EXPLAINED = {True: 1e-6, False: 0.02}
"""Of a gradient, that parts may leave unexplained."""


_AFTER = " after a step"
_ACROSS = "its loss, or a layer, looks across samples: give what it compares to evener.gather(...) first"


class Verdict(msgspec.Struct, frozen=True):
    """What was found.

    Attributes:
        where: what differed most.
        off: by how much, relative to its size.
        sentence: with which the program is refused; empty if it trains what one process trains.
        is_finite: whether the gradients of one process are numbers, so that the comparison says something.
    """

    where: str
    off: float
    sentence: str = ""
    is_finite: bool = True


def judge(
    divided: Path, whole: Path, is_wide: bool, layers: str | None = None, names: Collection[str] | None = None
) -> Verdict:
    """Compare what the copies wrote.

    Args:
        divided: of those that divided the batch, without a suffix.
        whole: of the one that did not.
        is_wide: whether they computed in float64.
        layers: how they divided layers; None: they divided batches.
        names: of tensors outside the models that were alike before the first step; None: this is before it.
    """
    values, expected = load_file(divided.with_suffix(".safetensors")), load_file(whole.with_suffix(".safetensors"))
    facts, (right,) = read_facts(divided), read_facts(whole)
    all_parts = {name: (values.pop(name), expected.pop(name)[0]) for name in list(values) if name.startswith(PARTS)}
    found = list(_differences(values, expected))
    worst = max(found, key=lambda one: one.off, default=Difference("nothing was trained", 0.0))
    tolerance = max(_TOLERANCE[is_wide], right.tolerance if is_wide else 0.0)
    if worst.off <= tolerance:
        gradients = [value for name, value in expected.items() if "/gradient/" in name]
        is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        return Verdict(where=worst.what, off=worst.off, is_finite=is_finite)
    first = next(one for one in found if one.off > tolerance)
    batch = len(all_parts) - 1 if first.what.endswith(_AFTER) else _batch_of(first.what)
    advice = f"leave --strategy {layers} out" if layers else known_cause(facts, right, names)
    if not advice:
        advice = _advice(*all_parts[f"{PARTS}{batch}"], is_wide) or later_cause(facts, right, names) or _ACROSS
    return Verdict(where=first.what, off=first.off, sentence=_sentence(first, advice))


def _differences(values: dict[str, Tensor], expected: dict[str, Tensor]) -> Iterator[Difference]:
    """Gradients first, then the state afterwards: where gradients agree, only what they did not change."""
    gradients = sorted((name for name in {**expected, **values} if "/gradient/" in name), key=_batch_of)
    most = max((largest(expected[name]) for name in gradients if name in expected), default=0.0)
    for name in gradients:
        known = expected.get(name, torch.empty(0, 0))
        off = off_by(values.get(name, torch.empty(0, 0)), known, max(largest(known), _LEAST * most))
        yield Difference(f"the gradient of {name.split('/', 2)[2]}", off)
    for name, known in expected.items():
        has_gradient = name.replace("/state/", "/gradient/") in expected
        if "/state/" in name and known.is_floating_point() and not has_gradient:
            value = values.get(name, torch.empty(0, 0))
            size = max(largest(known), 1e-6, statistic_size(name, expected))
            yield Difference(f"{name.split('/', 2)[2]}{_AFTER}", off_by(value, known, size))


def _batch_of(name: str) -> int:
    """The number, from 0, of the batch that a gradient is of."""
    number = name.rpartition(OF_BATCH)[2]
    return int(number) - 1 if OF_BATCH in name and number.isdigit() else 0


def _advice(parts: Tensor, total: Tensor, is_wide: bool) -> str:
    """What the loss seems to be, and what to say to `run.prepare`: which factors of the parts make up the whole."""
    bound = _EXPLAINED[is_wide] * float(total.norm())
    if parts.shape[1:] == total.shape and not total.any() and not parts.any():
        return "it does not keep its gradients by loss.backward(), so that nobody can take their mean over the nodes"
    if parts.shape[1:] != total.shape or not parts.isfinite().all() or not total.isfinite().all():
        return ""
    if float((parts.sum(0) - total).norm()) <= bound:
        return 'its loss seems to be a sum over samples: say run.prepare(..., count="sum")'
    factors = torch.linalg.lstsq(parts.t(), total[:, None], driver="gelsd").solution[:, 0]
    if float((factors @ parts - total).norm()) <= bound:
        return (
            "its loss seems to be a mean over something else than samples: say of what, such as "
            "run.prepare(..., count=lambda batch: number of tokens that are no padding, or sum of class weights)"
        )
    return ""


def _sentence(found: Difference, advice: str) -> str:
    return (
        f"the program would train something else than in one process: {found.what} is {found.off:.2g} times its size "
        "off" + (f"; {advice}" if advice else "") + "; or start it with --approximate"
    )
