"""What a pipeline's stages hold at the peak of a step, counted tensor by tensor in their processes, so without noise.

python benchmarks/pipeline_memory.py growth [--figure FILE.png]   # peaks over N, L, K, M, and GPipe's rule fitted
python benchmarks/pipeline_memory.py amoebanet                    # AmoebaNet-D with and without recomputing
python benchmarks/pipeline_memory.py transformer                  # the largest one that a budget a device allows
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
import torch.nn.functional as F
from pipeline import CPU, unpinned
from results import Results, open_results, parser_of
from turns import spread

from evener.benchmark.dry_run import LiveBytes
from evener.comm.group import Group
from evener.experiments.local_ranks import measure_on
from evener.experiments.models.amoebanet import AmoebaNetD
from evener.experiments.models.transformer import Transformer, tokens_in, translation_loss
from evener.oracle.schedule import Rematerialise
from evener.oracle.stages import DeviceGroup
from evener.parallel.pipeline.pipeline import Pipeline
from evener.records.errors import DoesNotFit
from support.pipeline_peaks import Fit, Peak, fitted, grid, measure_peaks

MICRO_BATCHES = (1, 2, 4, 8)
POLICIES: tuple[Rematerialise, ...] = ("never", "always")
SIZES = grid(samples=(16, 32), layers=(8, 16, 32), stages=(1, 2, 4), micro_batches=MICRO_BATCHES)


def hold(group: Group) -> dict[str, list[Peak]]:
    """One of four ranks: the peaks of all sizes, without and with recomputing."""
    return {policy: measure_peaks(group, SIZES, policy) for policy in POLICIES}


PEAK = "{samples:3} {layers:3} {stages:2} {micro_batches:2} {bytes:10} {rule:9.0%} {without:8.2f}x"


def growth(results: Results) -> None:
    """The fit, a row for every N, L, K, M, and a figure if one is wanted."""
    found = measure_on(unpinned(*[1.0] * 4), hold, dict[str, list[Peak]])
    always, never = found["always"], found["never"]
    rule = fitted(always)
    results.add(
        "with recomputing: peak = {a:.0f} N + {b:.0f} (L/K + {c:.2f}) N/M bytes\n"
        "R^2 = {determination:.5f}, largest error {worst:.1%} of a peak, {sizes} sizes\n",
        benchmark="growth",
        sizes=len(always),
        **rule._asdict(),
    )
    results.say("  N   L  K  M      bytes  the rule  without")
    for a, n in zip(always, never, strict=True):
        shares = {"rule": rule.bytes_of(a.size) / a.nbytes, "without": n.nbytes / a.nbytes}
        results.add(PEAK, benchmark="growth", **a.size._asdict(), bytes=a.nbytes, **shares)
    for m in MICRO_BATCHES:
        times = spread(n.nbytes / rule.bytes_of(n.size) for n in never if n.size.micro_batches == m)
        text = "without recomputing, M={micro_batches}: {times.least:.2f} to {times.most:.2f} times the rule"
        results.add(text, benchmark="growth", micro_batches=m, times=times)
    if results.options.figure:
        draw(rule, always, never, results.options.figure)


def draw(rule: Fit, always: Sequence[Peak], never: Sequence[Peak], file: str) -> None:
    """Every size's peak over what the rule says of it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(figsize=(6, 5), layout="constrained")
    for label, peaks, mark in (("recomputed", always, "o"), ("kept", never, "x")):
        axes.scatter(
            [rule.bytes_of(p.size) / 1e6 for p in peaks], [p.nbytes / 1e6 for p in peaks], marker=mark, label=label
        )
    ends = [rule.bytes_of(size) / 1e6 for size in (min(SIZES, key=rule.bytes_of), max(SIZES, key=rule.bytes_of))]
    axes.plot(ends, ends, color="gray", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="a N + b (L/K + c) N/M, fitted [MB]", ylabel="peak activations [MB]")
    axes.set_title(f"Fullest stage of K, R² = {rule.determination:.4f} with recomputing")
    axes.legend()
    drawing.savefig(file, dpi=150)


def amoebanet(results: Results) -> None:
    """Activation bytes of AmoebaNet-D in one process."""
    x, y = torch.randn(16, 3, 32, 32), torch.zeros(16, dtype=torch.long)
    for micro_batches in (2, 4, 8):
        peaks = {}
        for policy in POLICIES:
            torch.manual_seed(0)
            pipeline = Pipeline(
                AmoebaNetD(3, 32, 10), x, F.cross_entropy, on=[CPU], costs="estimated", schedule="gpipe",
                rematerialise=policy, micro_batches=micro_batches,
            )  # fmt: skip
            pipeline.step(x, y)
            with LiveBytes() as live:
                pipeline.step(x, y)
            peaks[policy] = live.peak
        results.add(
            "M={micro_batches}: {mb:.1f} MB without, {share:.1%} of them with recomputing",
            benchmark="amoebanet",
            micro_batches=micro_batches,
            mb=peaks["never"] / 1e6,
            share=peaks["always"] / peaks["never"],
        )


def transformer_pipeline(layers: int, on: Group | list[torch.device], budget: float, size: int) -> Pipeline:
    """A Transformer of so many layers, built without memory, on devices of so much."""
    with torch.device("meta"):
        model = Transformer(64, layers, dim=64, heads=4, hidden=256, dropout=0.0, tied=False)
    tokens = torch.ones(16, 8, dtype=torch.long)
    team = DeviceGroup(memory=(budget,) * size)
    return Pipeline(
        model, (tokens, tokens), translation_loss, on=on, micro_batches=8, rematerialise="always", costs="estimated",
        team=team, weigh=lambda targets: float(tokens_in(targets)),
    )  # fmt: skip


class Largest(NamedTuple):
    """The largest model that fits: its layers, its parameters, and the bytes held on the fullest rank."""

    layers: int
    parameters: int
    fullest_bytes: int


def largest(budget: float, group: Group) -> Largest:
    """One rank: the most layers that fit, and what a step of that model really holds."""

    def fits(layers: int) -> Pipeline | None:
        try:
            return transformer_pipeline(layers, group if group.size > 1 else [CPU], budget, group.size)
        except DoesNotFit:
            return None

    low, high = 1, 2
    while fits(high) is not None:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) is not None else (low, middle)
    pipeline = fits(low)
    assert pipeline is not None
    tokens = torch.ones(16, 8, dtype=torch.long)
    pipeline.step((tokens, tokens), tokens)
    with LiveBytes() as live:
        pipeline.step((tokens, tokens), tokens)
    own = [sum(p.numel() for p in pipeline.parameters()), sum(p.nbytes for p in pipeline.parameters()) * 4 + live.peak]
    rows = [list(map(int, row.split())) for row in group.all_gather_bytes(f"{own[0]} {own[1]}".encode())]
    return Largest(low, sum(count for count, _ in rows), max(held for _, held in rows))


def transformer(results: Results) -> None:
    """The largest Transformer on one, two and four devices of 24 MB."""
    first, budget = 0.0, 24e6
    for devices in (1, 2, 4):
        found = measure_on(unpinned(*[1.0] * devices), partial(largest, budget), Largest)
        first = first or found.parameters
        results.add(
            "K={devices}: {layers} layers, {parameters} parameters, {share:.3f} of K times those of K=1;\n"
            "      weights, gradients, Adam's state and activations fill {filled:.0%} of the fullest device",
            benchmark="transformer",
            devices=devices,
            layers=found.layers,
            parameters=found.parameters,
            share=found.parameters / first / devices,
            filled=found.fullest_bytes / budget,
        )


BENCHMARKS = {"growth": growth, "amoebanet": amoebanet, "transformer": transformer}


def main() -> None:
    """The benchmarks that are named."""
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="+", choices=list(BENCHMARKS))
    parser.add_argument("--figure", help="of growth; needs Matplotlib")
    words = parser.parse_args()
    torch.set_num_threads(1)
    with open_results(words) as results:
        for name in words.names:
            BENCHMARKS[name](results)


if __name__ == "__main__":
    import_module("pipeline_memory").main()  # ranks import what is defined here
