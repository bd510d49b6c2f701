"""What a pipeline takes: idle time, unequal devices, bytes kept and bytes sent, as they should be.

Layers of a model for these tests wait instead of computing, so that many ranks on few cores do not disturb each other.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.benchmark.dry_run import LiveBytes
from evener.comm.joining import leave_group
from evener.experiments.models.amoebanet import AmoebaNetD
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.schedule import bubble
from evener.oracle.stages import DeviceGroup
from evener.parallel.pipeline.partition_plan import IN_FLIGHT
from evener.parallel.pipeline.pipeline import Pipeline
from evener.records.errors import DoesNotFit, EvenerError
from support.pipeline_cases import CASES, joined, start
from support.pipeline_peaks import DIM, TOKENS, Size, fitted, grid, measure_peaks
from support.refusals import refused

CPU = torch.device("cpu")
SPEED = 1.0
"""Of this process's waiting."""


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        if not x.is_meta:
            time.sleep(seconds / SPEED)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds / SPEED)
        return gradients[0], None


class Wait(nn.Module):
    """Waits in both passes."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = _Wait.apply(x * self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return outputs


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def waiting(layers: int, seconds: float) -> nn.Sequential:
    return nn.Sequential(*(Wait(seconds) for _ in range(layers)))


def measure_bubble(env: RankEnvironment, _order: None) -> None:
    """One rank: the idle share of two and of four stages."""
    group = joined(env)
    pair = group.subgroup([0, 1])
    for stages, ranks in ((4, group), (2, pair)):
        if ranks is None:
            continue
        for micro_batches, schedule in product((1, 4, 16), ("gpipe", "1f1b")):
            x = torch.zeros(micro_batches, 3)
            names = [str(i) for i in range(1, stages)]
            options: dict[str, Any] = {"schedule": schedule, "rematerialise": "never", "micro_batches": micro_batches}
            pipeline = Pipeline(waiting(stages, 0.02), x, F.mse_loss, stages=names, on=ranks, **options)
            expected, shares = bubble(stages, micro_batches), list[float]()
            while all(abs(share - expected) > 0.03 for share in shares):  # on a busy machine a try may be disturbed
                assert len(shares) < 4, (stages, micro_batches, schedule, expected, shares)
                pipeline.step(x, x)
                shares.append(pipeline.timeline().bubble)
    leave_group()


@pytest.mark.alone
@pytest.mark.slow
def test_idle_share_matches_the_paper() -> None:
    start(measure_bubble, 4)


def measure_uneven(env: RankEnvironment, _order: None) -> None:
    """One rank: stages chosen for the speeds 1 and 1/2 against equal ones."""
    global SPEED
    SPEED = (0.5, 1.0)[env.rank]
    group, layers, micro_batches = joined(env), 12, 12
    x = torch.zeros(micro_batches, 3)
    seconds = {}
    for way in ("chosen", "equal"):
        names = None if way == "chosen" else [str(layers // 2)]
        model = waiting(layers, 0.01)
        pipeline = Pipeline(model, x, F.mse_loss, stages=names, on=group, micro_batches=micro_batches)
        took = []
        for _ in range(2):
            group.barrier()
            begin = time.perf_counter()
            pipeline.step(x, x)
            group.barrier()
            took.append(time.perf_counter() - begin)
        seconds[way] = min(took)
    work = 2 * layers * 0.01
    ideal = work / 1.5 * (micro_batches + 1)
    assert seconds["equal"] / seconds["chosen"] > 1.25, seconds
    assert ideal / seconds["chosen"] > 0.9, (ideal, seconds)
    leave_group()


@pytest.mark.alone
@pytest.mark.slow
def test_unequal_stages_are_faster_on_unequal_devices() -> None:
    start(measure_uneven, 2)


def measure_memory(env: RankEnvironment, sizes: list[Size]) -> None:
    """One rank: GPipe's rule holds for the peaks of all sizes if activations are recomputed, else not."""
    group = joined(env)
    rule = fitted(measure_peaks(group, sizes, "always"))
    sample, layer = 4 * TOKENS * DIM, 4 * TOKENS * DIM * 6  # of which it keeps 6: inputs, normalised, wide twice
    assert rule.determination > 0.995, rule
    assert rule.worst < 0.1, rule
    assert sample <= rule.a < 2 * sample, rule  # what comes in, and some of what goes out
    assert rule.b == pytest.approx(layer, rel=0.1), rule
    assert 0 < rule.c < IN_FLIGHT / 6 + 1, rule
    in_many_parts = [size for size in sizes if size.micro_batches == 8]
    assert all(kept.nbytes > 2.5 * rule.bytes_of(kept.size) for kept in measure_peaks(group, in_many_parts, "never"))
    leave_group()


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "layers"), [((1, 2), (8,)), ((1, 2, 4), (8, 16))])
def test_peak_activations_grow_with_batch_and_stage_layers(stages: tuple[int, ...], layers: tuple[int, ...]) -> None:
    start(measure_memory, max(stages), grid(samples=(8, 16), layers=layers, stages=stages, micro_batches=(1, 2, 8)))


@pytest.mark.slow
def test_recomputing_stores_at_most_58_percent_of_activations() -> None:
    micro_batches = 2
    x, y = torch.randn(8, 3, 32, 32), torch.zeros(8, dtype=torch.long)
    peaks = {}
    for policy in ("never", "always"):
        options: dict[str, Any] = {"schedule": "gpipe", "rematerialise": policy, "micro_batches": micro_batches}
        model = AmoebaNetD(3, 32, 5)
        pipeline = Pipeline(model, x, F.cross_entropy, on=[CPU], costs="estimated", **options)
        pipeline.step(x, y)
        with LiveBytes() as live:
            pipeline.step(x, y)
        peaks[policy] = live.peak
    assert peaks["always"] < 0.58 * peaks["never"]


@pytest.mark.parametrize("name", ["residual", "branches", "resnet152", "unet", "transformer"])
def test_peak_memory_stays_within_the_prediction(name: str) -> None:
    case, samples, micro_batches = CASES[name], 16, 4
    x, y = case.inputs(samples), case.targets(samples)
    options: dict[str, Any] = {"schedule": "gpipe", "micro_batches": micro_batches, "rematerialise": "always"}
    pipeline = Pipeline(case.make(), x, case.loss, on=[CPU], costs="estimated", weigh=case.weigh, **options)
    pipeline.step(x, y)
    with LiveBytes() as live:
        pipeline.step(x, y)
    kept, passing = pipeline.plan.kept_bytes[0], pipeline.plan.passing_bytes[0]
    assert 0.8 * (kept + passing) < live.peak <= kept + passing


def test_temporary_memory_must_fit_too() -> None:
    x = torch.randn(8, 1000)
    model, kept = nn.Linear(1000, 1000), 4 * (4 * 1_001_000)  # weights, gradients, the optimiser's state
    for more, fits in ((0.1e6, False), (5e6, True)):  # backward makes another gradient of the weights first
        options: dict[str, Any] = {"on": [CPU], "costs": "estimated", "micro_batches": 1}
        with nullcontext() if fits else pytest.raises(DoesNotFit):
            Pipeline(model, x, F.mse_loss, team=DeviceGroup(memory=(kept + more,)), **options)


@pytest.mark.alone
def test_stage_with_a_slow_loss_gets_fewer_layers() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        time.sleep(0.02)
        return F.mse_loss(outputs, targets)

    x, options = torch.zeros(2, 3), {"on": [CPU] * 2, "micro_batches": 2}
    layers = []
    for targets in (None, x):
        pipeline = Pipeline(waiting(8, 0.005), x, loss, targets=targets, **options)  # type: ignore[arg-type]
        layers.append([len({name.split(".")[0] for name in names}) for names in pipeline.plan.layout.targets])
    assert layers == [[4, 4], [5, 3]]


def test_auto_recomputes_as_much_as_memory_requires() -> None:
    x, y = torch.randn(16, 3, 32, 32), torch.zeros(16, dtype=torch.long)
    recomputed = []
    for memory in (float("inf"), 1.7e6, 0.9e6):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(10)), nn.Flatten(), nn.Linear(3072, 4))
        options: dict[str, Any] = {"schedule": "gpipe", "micro_batches": 8, "costs": "estimated"}
        pipeline = Pipeline(model, x, F.cross_entropy, on=[CPU], team=DeviceGroup(memory=(memory,)), **options)
        pipeline.step(x, y)
        with LiveBytes() as live:
            pipeline.step(x, y)
        assert live.peak < memory
        recomputed.append(sum(event.kind == "recompute" for event in pipeline.timeline().events))
    assert recomputed[0] == 0 < recomputed[1] < recomputed[2] <= 8


def count_bytes(env: RankEnvironment, _order: None) -> None:
    """One rank: what it sends are the values that cross its cuts, and their gradients."""
    group = joined(env)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 2))
    x, y = torch.zeros(7, 3), torch.zeros(7, 2)
    pipeline = Pipeline(model, x, F.mse_loss, stages=["1", "2"], on=group, micro_batches=2)
    pipeline.step(x, y)
    expected = {
        0: {"activations": 7 * 5 * 4},
        1: {"activations": 7 * 7 * 4, "gradients": 7 * 5 * 4},
        2: {"gradients": 7 * 7 * 4},
    }[env.rank]
    sent = {kind: nbytes for kind, nbytes in group.traffic.sent.items() if nbytes}
    assert sent == expected
    leave_group()


def test_values_at_cuts_and_their_gradients_are_the_only_traffic() -> None:
    start(count_bytes, 3)


def disagree(env: RankEnvironment, _order: None) -> None:
    """One rank, that wants another schedule than the other."""
    group = joined(env)
    schedule: Any = ("gpipe", "1f1b")[env.rank]
    Pipeline(waiting(2, 0.0), torch.zeros(2, 3), F.mse_loss, on=group, schedule=schedule, costs="estimated")


def test_ranks_with_different_schedules_are_refused() -> None:
    with refused(EvenerError):
        start(disagree, 2)
