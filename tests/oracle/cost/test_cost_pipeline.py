"""Pipelines: cut by time and memory, simulated, alone and side by side."""

from __future__ import annotations

from functools import partial
from itertools import combinations

import pytest

from evener.oracle.cost.layers import columns
from evener.oracle.cost.pipeline import PipelineReplica, make_pipeline, price_pipeline
from evener.oracle.schedule import ScheduleChoice
from evener.oracle.zoo.networks import unet
from evener.records.errors import DoesNotFit
from support.imagined_machines import convolutions, model

free = partial(model, alpha=0.0, beta=0.0)


def test_bytes_across_a_cut_are_the_values_read_by_later_layers() -> None:
    layers = columns(unet((3, 32, 32)))
    names = [layer.name for layer in layers.graph.layers]
    crossing = dict(zip(names, layers.boundary_bytes, strict=True))
    size = 4 * 32 * 32 * 64
    assert crossing["down0.relu2"] == size
    assert crossing["pool0"] == size + size // 4
    assert crossing["bottom.relu2"] == size + size // 2 + size // 4 + size // 8 + size // 16
    assert crossing["head"] == 0


def test_stages_are_as_equal_as_the_layers_allow() -> None:
    team = free(
        [1, 1],
        graph=convolutions(depth=5),
    )
    line = make_pipeline(team, [0, 1], samples=8, micro_batches=4)
    seconds = team.seconds(0)
    each = seconds.of(8).sum(axis=(0, 1))
    best = min(max(each[:cut].sum(), each[cut:].sum()) for cut in range(1, len(each)))
    assert max(line.timeline.busy) == pytest.approx(4 * best)
    assert line.starts[0] == 0


def test_a_faster_device_gets_the_longer_stage() -> None:
    team = free(
        [1.0, 0.5, 0.25],
        graph=convolutions(depth=7),
    )
    line = make_pipeline(team, [0, 1, 2], samples=8, micro_batches=4)
    alone = team.workers[0].unit_seconds * 8 * 4
    assert max(line.timeline.busy) < 0.75 * alone
    assert sorted(line.order) == [0, 1, 2]


def test_no_three_stage_cut_is_faster_by_brute_force() -> None:
    team = free(
        [1.0, 0.6, 0.8],
        graph=convolutions(depth=4),
    )
    each = [team.seconds(device).of(4).sum(axis=(0, 1)) for device in range(3)]
    size = len(each[0])
    orders = [(a, b, c) for a in range(3) for b in range(3) for c in range(3) if {a, b, c} == {0, 1, 2}]
    best = min(
        max(each[a][:i].sum(), each[b][i:j].sum(), each[c][j:].sum())
        for i, j in combinations(range(1, size), 2)
        for a, b, c in orders
    )
    assert max(make_pipeline(team, [0, 1, 2], 4, 6).timeline.busy) == pytest.approx(6 * best)


def test_stages_recompute_if_activations_do_not_fit_and_take_longer() -> None:
    graph = convolutions(depth=8, width=32)
    roomy = make_pipeline(model([1, 1], graph=graph), [0, 1], 4, 8)
    tight_bytes = int(max(roomy.memory_bytes) * 0.75)
    tight = make_pipeline(model([1, 1], graph=graph, memory=tight_bytes), [0, 1], 4, 8)
    assert max(tight.memory_bytes) <= tight_bytes
    assert tight.timeline.seconds > roomy.timeline.seconds
    with pytest.raises(DoesNotFit):
        make_pipeline(model([1, 1], graph=graph, memory=1000), [0, 1], 4, 8)


def test_backward_passes_that_recompute_are_priced_undivided() -> None:
    graph = convolutions(depth=8, width=32)
    roomy = make_pipeline(model([1, 1], graph=graph, schedule="zero-bubble"), [0, 1], 4, 8)
    tight = make_pipeline(
        model([1, 1], graph=graph, schedule="zero-bubble", memory=int(max(roomy.memory_bytes) * 0.75)), [0, 1], 4, 8
    )
    kinds = [{action.kind for stage in line.timeline.passes for action, _, _ in stage} for line in (roomy, tight)]
    assert ["weights" in one for one in kinds] == [True, False]
    assert tight.timeline.seconds > roomy.timeline.seconds


def test_open_schedule_is_the_fastest_that_fits() -> None:
    fixed: dict[ScheduleChoice, PipelineReplica] = {
        name: make_pipeline(free([1, 1, 1], graph=convolutions(depth=8, width=32), schedule=name), [0, 1, 2], 4, 8)
        for name in ("1f1b", "zero-bubble")
    }
    assert fixed["zero-bubble"].timeline.seconds < 0.95 * fixed["1f1b"].timeline.seconds
    needed = {name: max(line.memory_bytes) for name, line in fixed.items()}
    assert needed["1f1b"] < needed["zero-bubble"]
    for memory, expected in ((needed["zero-bubble"], "zero-bubble"), (needed["zero-bubble"] - 1, "1f1b")):
        team = free([1, 1, 1], graph=convolutions(depth=8, width=32), memory=memory, batch_size=32)
        line = make_pipeline(team, [0, 1, 2], 4, 8)
        assert line.schedule == expected
        assert line.timeline.seconds == fixed[line.schedule].timeline.seconds
        assert max(line.memory_bytes) <= memory
        priced = price_pipeline(team, [[0, 1, 2]], 8)
        assert priced.schedule == expected


def test_more_micro_batches_leave_smaller_bubbles() -> None:
    team = free(
        [1, 1],
        batch_size=64,
    )
    few, many = (price_pipeline(team, [[0, 1]], count) for count in (2, 16))
    assert many.waiting_seconds < few.waiting_seconds
    assert many.strategy == "pipeline"
    assert many.samples == (4, 4)
    assert sum(many.shares) == pytest.approx(1)


def test_rows_of_stages_share_samples_by_speed_and_sum_gradients() -> None:
    team = model([1, 1, 0.5, 0.5], batch_size=96, beta=1e-12)
    estimate = price_pipeline(team, [[0, 1], [2, 3]], 8)
    assert estimate.strategy == "data+pipeline"
    assert estimate.samples == (8, 8, 4, 4)
    assert estimate.replicas == (0, 0, 1, 1)
    alone = price_pipeline(model([1, 1], batch_size=64, beta=1e-12), [[0, 1]], 8)
    assert estimate.sent_bytes > alone.sent_bytes


def test_messages_between_stages_count_in_both_directions() -> None:
    estimate = price_pipeline(model([1, 1], graph=convolutions(depth=2), batch_size=8), [[0, 1]], 4)
    image = 4 * 16 * 16 * 16
    assert estimate.sent_bytes % (4 * 2) == 0
    assert estimate.sent_bytes <= 8 * image
