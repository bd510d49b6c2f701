"""Where a model may be cut, what would travel there, and what is refused."""

from __future__ import annotations

import copy
from itertools import groupby, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.experiments.models.resnet import resnet152
from evener.experiments.models.unet import UNet
from evener.oracle.stages import DeviceGroup
from evener.parallel.pipeline.partition_problem import cut_points, trace_micro_batch
from evener.parallel.pipeline.pipeline import Pipeline
from evener.parallel.pipeline.stage_layout import split
from evener.records.errors import DoesNotFit, InvalidInput, InvalidValue, file_line
from support.refusals import refused

CPU = torch.device("cpu")


def chain(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def piped(model: nn.Module, example: Any, stages: Any, **options: Any) -> Pipeline:
    number = stages if isinstance(stages, int) else len(stages) + 1
    return Pipeline(
        model, example, lambda y, t: (y - t).square().mean(), stages=stages, on=[CPU] * number, micro_batches=2,
        **{"costs": "estimated", **options},
    )  # fmt: skip


def test_bytes_across_a_cut_cover_all_live_values() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(2, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.c(self.b(y)) + y + x.sum(1, keepdim=True)  # type: ignore[no-any-return]

    model = Skips()
    found = cut_points(trace_micro_batch(model, torch.zeros(3, 4), CPU), model)
    assert [cut.nbytes // (3 * 4) for cut in found] == [8 + 4, 8 + 2 + 4, 8 + 8 + 4, 8 + 4, 8 + 1]


def test_value_is_sent_directly_to_the_stages_that_use_it() -> None:
    model = UNet(3, 2, width=4, depth=2)
    traced = trace_micro_batch(model, torch.zeros(2, 3, 8, 8), CPU)
    count = len(traced.operations)
    graphs = split(traced, [5 * i // count for i in range(count)], 5)
    skips = [value for graph in graphs for value in graph.outputs if value.used_by[-1] > value.made_by + 1]
    assert skips
    for value in skips:
        for stage in range(value.made_by + 1, 5):
            received = value.name in [given.name for given in graphs[stage].inputs]
            assert received == (stage in value.used_by)


def test_stages_can_be_named_as_segments_of_resnet152() -> None:
    model = resnet152(5, width=4, depths=(1, 1, 2, 1))
    names = [name for name, _ in model.named_children()]
    pipeline = piped(model, torch.zeros(4, 3, 64, 64), names[1:])
    held = [{target.split(".")[0] for target in targets} for targets in pipeline.plan.layout.targets]
    assert held == [{name} for name in names]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (9, "stages must be at most 3, because the model has 2 cut points, got 9"),
        (["3"], "stages must be names of modules that the model runs, got '3'"),
        (["2", "1"], "names of modules in the order in which they run, each once"),
        (["0"], "stages must be places where the model can be cut; the nearest are _1 and _2, got '0'"),
        (0, "stages must be positive, got 0"),
    ],
)
def test_impossible_stages_are_refused(stages: Any, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        piped(chain(2, 2, 2, 2), torch.zeros(4, 2), stages)


def test_too_few_cuts_error_names_the_undivided_module() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return 1 + self.linear(x) if torch.rand(()) > 0.5 else x

    with refused(InvalidValue):
        piped(nn.Sequential(Whole(), nn.Linear(2, 2)), torch.zeros(4, 2), 3)


def test_statistics_updated_in_two_places_stay_on_one_stage() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layers = nn.BatchNorm1d(4), chain(4, 4, 4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[2](self.norm(self.layers[1](self.norm(self.layers[0](x)))))  # type: ignore[no-any-return]

    model = Twice()
    assert [cut.position for cut in cut_points(trace_micro_batch(model, torch.zeros(3, 4), CPU), model)] == [1, 4]


def test_evaluation_order_that_contradicts_the_cut_is_refused() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) if self.training else self.a(self.b(x))  # type: ignore[no-any-return]

    with refused(InvalidInput):
        piped(Backwards(), torch.zeros(4, 2), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batches": 0}, "micro_batches must be positive, got 0"),
        ({"schedule": "zigzag"}, "schedule must be one of auto, gpipe, 1f1b, zero-bubble, got 'zigzag'"),
        ({"rematerialise": "some"}, "rematerialise must be one of always, except_last, never, auto, got 'some'"),
        ({"replicas": [[0], [0]]}, "replicas must be each rank from 0 to 1 once"),
        ({"on": [CPU] * 3}, "stages must be 3, one on every device or rank of a replica, got 2"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        Pipeline(chain(2, 2, 2), torch.zeros(4, 2), nn.MSELoss(), **{"stages": 2, "on": [CPU] * 2, **options})


def test_untraceable_model_is_refused_with_its_line() -> None:
    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    line = file_line(__file__, Gate.forward.__code__.co_firstlineno + 1)
    with pytest.raises(InvalidInput, match=rf"the model cannot be cut into stages, because of {line} .*x.sum"):
        piped(Gate(), torch.zeros(4, 2), 2)


def test_gradient_crosses_a_cut_through_a_mask_with_written_inputs() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            mask = torch.zeros(x.shape[0], 4)
            mask[:, 1:] = y[:, 1:]
            return self.b(mask)  # type: ignore[no-any-return]

    model, x = Masked(), torch.randn(6, 4)
    whole = copy.deepcopy(model)
    torch.autograd.backward((whole(x) - x).square().mean())
    piped(model, x, ["b"]).step(x, x)
    for own, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_open_schedule_is_the_fastest_that_fits_without_recomputing() -> None:
    def schedule(memory: float, **options: Any) -> str:
        pipeline = Pipeline(
            chain(*[64] * 7), torch.zeros(256, 64), F.mse_loss, on=[CPU] * 3, micro_batches=8,
            costs="estimated", team=DeviceGroup(memory=(memory,) * 3), **options
        )  # fmt: skip
        return pipeline.schedule

    memories = [4e6 * 0.9**times for times in range(60)]
    chosen = []
    for memory in memories:
        try:
            chosen.append(schedule(memory, rematerialise="never"))
        except DoesNotFit:
            break
    assert [name for name, _ in groupby(chosen)] == ["zero-bubble", "1f1b"]
    first = memories[chosen.index("1f1b")]
    with refused(DoesNotFit):
        Pipeline(
            chain(*[64] * 7), torch.zeros(256, 64), F.mse_loss, on=[CPU] * 3, micro_batches=8, costs="estimated",
            team=DeviceGroup(memory=(first,) * 3), rematerialise="never", schedule="zero-bubble",
        )  # fmt: skip
    assert schedule(1e9, rematerialise="always") == "1f1b"
    assert schedule(1e9, schedule="gpipe") == "gpipe"
