"""Holds what the ranks gave against what one process gave, and says which of seven it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evener.records.errors import NotExact
from exact.divisions import SAMPLES_ONLY, WAYS
from exact.recipe import recipe_of
from exact.runs import Outcome
from exact.worlds import Hang, Job, Reply, Worlds

TOLERANCE = 1e-9
"""Of float64, relative to the largest number, at least 1."""
BY_CHECK = "refused by the check"
VERDICTS = ("equal", "documented", "refused by name", BY_CHECK, "different", "traceback", "hang")
"""Different is what the self-check missed, if there was one."""
GOOD = VERDICTS[:4]
LONGEST = 300
"""Characters of a sentence."""


@dataclass(frozen=True)
class Verdict:
    """Of one recipe, divided in one way.

    Attributes:
        recipe: by name.
        way: by name.
        verdict: one of VERDICTS.
        symptom: what differs and how much, or what was raised and where.
    """

    recipe: str
    way: str
    verdict: str
    symptom: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the law is kept; a refusal that is too long to be a sentence is none."""
        return self.verdict in GOOD and not (self.verdict.startswith("refused") and len(self.symptom) >= LONGEST)


class IllegalRecipe(Exception):
    """One process alone cannot run it."""


def judge(
    worlds: Worlds, reference: str, ways: Iterable[str] = tuple(WAYS), is_checked: bool = True, plant: str = ""
) -> list[Verdict]:
    """The verdicts of a recipe, after the self-check of a run or without, with a defect if one is named.

    Raises:
        IllegalRecipe: one process alone cannot run it.
    """
    whole = worlds.run(Job(reference))[0]
    if whole.error:
        raise IllegalRecipe(f"{reference}: {whole.error}: {whole.sentence} ({whole.place})")
    expected = Outcome.of_bytes(whole.outcome)
    found = []
    for way in ways:
        try:
            verdict, symptom = _verdict(worlds.run(Job(reference, way, expected.across, is_checked, plant)), expected)
        except Hang:
            verdict, symptom = "hang", "no rank ended"
        if verdict == "different" and recipe_of(reference).draws and WAYS[way].strategy in SAMPLES_ONLY:
            verdict = "documented"
        found.append(Verdict(reference, way, verdict, symptom))
    return found


def _verdict(replies: Sequence[Reply], expected: Outcome) -> tuple[str, str]:
    errors = sorted((reply for reply in replies if reply.error), key=lambda reply: reply.lost)
    if errors:
        first = errors[0]
        own = next((one for one in errors if not one.refused and not one.lost), first)
        if own.refused and all(one.refused or one.lost for one in errors):
            return BY_CHECK if own.error == NotExact.__name__ else "refused by name", own.sentence
        return "traceback", f"{own.error}: {own.sentence} [{own.place}]"
    parts = [Outcome.of_bytes(reply.outcome) for reply in replies]
    symptom = difference(parts, expected)
    return ("different", symptom) if symptom else ("equal", "")


def difference(parts: Sequence[Outcome], expected: Outcome) -> str:
    """What is not as in one process; empty if all is."""
    losses = [sum(part.losses[i] for part in parts) for i in range(len(expected.losses))]
    found = [
        f"loss {i} off by {abs(a - b):.1e}"
        for i, (a, b) in enumerate(zip(losses, expected.losses, strict=True))
        if not abs(a - b) <= TOLERANCE * max(1.0, abs(b))
    ]
    for i, ((shape, tensors),) in enumerate(expected.outputs):
        rows = [one for part in parts for one in part.outputs[i]]
        found += _outputs_differ(f"evaluation {i}", rows, shape, tensors)
    weights = parts[0].weights
    if weights.keys() != expected.weights.keys():
        found.append(f"state has {sorted(weights.keys() ^ expected.weights.keys())[:3]} too many or too few")
    worst = [(off(weights[name], one), name) for name, one in expected.weights.items() if name in weights]
    wrong = sorted(((off, name) for off, name in worst if not off <= TOLERANCE), reverse=True)
    found += [f"{name} off by {off:.1e}" for off, name in wrong[:2]]
    if len(wrong) > 2:
        found.append(f"{len(wrong)} of {len(worst)} tensors off")
    return "; ".join(found)


def _outputs_differ(
    what: str, rows: list[tuple[list[str], list[Tensor]]], shape: list[str], tensors: list[Tensor]
) -> list[str]:
    if any(row[0] != shape for row in rows):
        return [f"{what} returns {next(row[0] for row in rows if row[0] != shape)} for {shape}"]
    samples = sum(len(row[1][0]) if row[1][0].dim() else 0 for row in rows)
    for i, whole in enumerate(tensors):
        own = [row[1][i] for row in rows]
        if len(own) > 1 and (whole.dim() == 0 or len(whole) != samples):
            continue  # of all samples together: no replica has it
        apart = off(torch.cat(own) if len(own) > 1 else own[0], whole)
        if not apart <= TOLERANCE:
            return [f"{what} off by {apart:.1e}"]
    return []


def off(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number, at least 1; infinite for other shapes."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    a, b = found.detach().double(), expected.detach().double()
    if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
        return float("inf")
    keep = torch.isfinite(b)
    a, b = a[keep], b[keep]
    return float((a - b).abs().max()) / max(1.0, float(b.abs().max())) if b.numel() else 0.0


def table(verdicts: Sequence[Verdict]) -> str:
    """Verdicts by strategy and by kind, as Markdown."""
    lines = ["| | of | " + " | ".join(VERDICTS) + " |", "|---" * (len(VERDICTS) + 2) + "|"]
    strategies = list(dict.fromkeys(WAYS[one.way].strategy for one in verdicts))
    kinds = list(dict.fromkeys(one.recipe.partition("/")[0] for one in verdicts))
    groups: list[tuple[str, Any]] = [
        *((name, lambda one, name=name: WAYS[one.way].strategy == name) for name in strategies),
        *((name, lambda one, name=name: one.recipe.startswith(f"{name}/")) for name in kinds),
        ("all", lambda _: True),
    ]
    for name, belongs in groups:
        count = Counter(one.verdict for one in verdicts if belongs(one))
        lines.append(f"| {name} | {count.total()} | " + " | ".join(str(count[v]) for v in VERDICTS) + " |")
    return "\n".join(lines)
