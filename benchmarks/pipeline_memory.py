"""What a pipeline's stages hold at the peak of a step, counted tensor by tensor in their processes, so without noise.

python benchmarks/pipeline_memory.py growth [--figure FILE.png]   # peaks over N, L, K, M, and GPipe's rule fitted
python benchmarks/pipeline_memory.py amoebanet                    # AmoebaNet-D with and without recomputing
python benchmarks/pipeline_memory.py transformer                  # the largest one that a budget a device allows
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "pipeline"))

import msgspec
import torch
import torch.nn.functional as F
from pipeline import CPU, hardware, joined, ranks

from evener.benchmark.dry_run import LiveBytes
from evener.comm.group import Group, leave_group
from evener.errors import DoesNotFit
from evener.launch.rank_environment import RankEnvironment
from evener.models.amoebanet import AmoebaNetD
from evener.models.transformer import Transformer, tokens_in, translation_loss
from evener.oracle.stages import DeviceGroup
from evener.parallel.pipeline.pipeline import Pipeline
from support.pipeline_peaks import Fit, Peak, fitted, grid, measure_peaks

MICRO_BATCHES = (1, 2, 4, 8)
SIZES = grid(samples=(16, 32), layers=(8, 16, 32), stages=(1, 2, 4), micro_batches=MICRO_BATCHES)


def hold(env: RankEnvironment, order: dict[str, Any]) -> None:
    """One of four ranks: the peaks of all sizes, without and with recomputing."""
    group = joined(env)
    found = {policy: measure_peaks(group, SIZES, policy) for policy in ("never", "always")}
    if env.rank == 0:
        Path(order["file"]).write_bytes(msgspec.json.encode(found))
    group.barrier()
    leave_group()


def growth(figure: str | None) -> None:
    """The fit, a row for every N, L, K, and a figure if one is wanted."""
    found = msgspec.json.decode(ranks(hold, [1.0] * 4, {}), type=dict[str, list[Peak]])
    always, never = found["always"], found["never"]
    rule = fitted(always)
    print(f"with recomputing: peak = {rule.a:.0f} N + {rule.b:.0f} (L/K + {rule.c:.2f}) N/M bytes")
    print(f"R^2 = {rule.determination:.5f}, largest error {rule.worst:.1%} of a peak, {len(always)} sizes\n")
    print("  N   L  K " + "".join(f"  M={m}: kB (rule) without" for m in MICRO_BATCHES))
    for i in range(0, len(SIZES), len(MICRO_BATCHES)):
        cells = [
            f"{a.nbytes / 1e3:8.0f} ({rule.bytes_of(a.size) / a.nbytes:4.0%}) {n.nbytes / a.nbytes:6.2f}x"
            for a, n in zip(always[i : i + len(MICRO_BATCHES)], never[i : i + len(MICRO_BATCHES)], strict=True)
        ]
        print(f"{SIZES[i].samples:3} {SIZES[i].layers:3} {SIZES[i].stages:2} " + " ".join(cells))
    for m in MICRO_BATCHES:
        ratios = [n.nbytes / rule.bytes_of(n.size) for n in never if n.size.micro_batches == m]
        print(f"without recomputing, M={m}: {min(ratios):.2f} to {max(ratios):.2f} times the rule")
    if figure:
        draw(rule, always, never, figure)


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


def amoebanet(_figure: str | None) -> None:
    """Activation bytes of AmoebaNet-D in one process."""
    x, y = torch.randn(16, 3, 32, 32), torch.zeros(16, dtype=torch.long)
    for micro_batches in (2, 4, 8):
        peaks = {}
        for policy in ("never", "always"):
            torch.manual_seed(0)
            pipeline = Pipeline(
                AmoebaNetD(3, 32, 10), x, F.cross_entropy, on=[CPU], costs="estimated", schedule="gpipe",
                rematerialise=policy, micro_batches=micro_batches,
            )  # fmt: skip
            pipeline.step(x, y)
            with LiveBytes() as live:
                pipeline.step(x, y)
            peaks[policy] = live.peak
        share = peaks["always"] / peaks["never"]
        print(
            f"M={micro_batches}: {peaks['never'] / 1e6:.1f} MB without, {share:.1%} of them with recomputing",
            flush=True,
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


def largest(env: RankEnvironment, order: dict[str, Any]) -> None:
    """One rank: the most layers that fit, and what a step of that model really holds on the fullest rank."""
    group, budget = joined(env), order["budget"]

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
    if env.rank == 0:
        fullest = max(held for _, held in rows) / budget
        Path(order["file"]).write_text(f"{low} {sum(count for count, _ in rows)} {fullest}")
    group.barrier()
    leave_group()


def transformer(_figure: str | None) -> None:
    """The largest Transformer on one, two and four devices of 24 MB."""
    first = 0.0
    for devices in (1, 2, 4):
        layers, parameters, fullest = map(float, ranks(largest, [1.0] * devices, {"budget": 24e6}).split())
        first = first or parameters
        share = parameters / first / devices
        size = f"{layers:.0f} layers, {parameters / 1e6:.2f} M parameters"
        print(f"K={devices}: {size}, {share:.3f} of K times those of K=1;")
        print(f"      weights, gradients, Adam's state and activations fill {fullest:.0%} of the fullest device")


BENCHMARKS = {"growth": growth, "amoebanet": amoebanet, "transformer": transformer}


def main() -> None:
    """Run the benchmarks that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=list(BENCHMARKS))
    parser.add_argument("--figure", help="of growth; needs Matplotlib")
    words = parser.parse_args()
    torch.set_num_threads(1)
    print(hardware())
    for name in words.names:
        BENCHMARKS[name](words.figure)


if __name__ == "__main__":
    main()
