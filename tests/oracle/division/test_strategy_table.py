"""THE TABLE as plain cases: in which layouts operations need and give values, what moves, which weights a rank has."""

from __future__ import annotations

from typing import get_args

import pytest

from evener.oracle.division.layout import ALIKE, PARTIAL, WHOLE, Layout, Replica, split
from evener.oracle.division.network import Kind, Network, Operation, Role, Sliding, Weight
from evener.oracle.division.plan import Arrangement, ReplicaPlan, plan_replica, plan_replicas
from evener.oracle.division.rules import TABLE, DivisionName
from evener.records.errors import InvalidValue
from support.step_traffic import elements, step_traffic


def weight(name: str, *shape: int, role: Role = "kernel") -> Weight:
    return Weight(name=name, shape=shape, role=role, trainable=True)


def block() -> Network:
    """A bottleneck's three convolutions on 16 channels, 4 inside, with a residual sum; then a mean and a classifier."""
    pixels, windows = (2, 16, 6, 6), (Sliding(3, 1, 1), Sliding(3, 1, 1))
    small = (2, 4, 6, 6)
    return Network(
        (
            Operation(name="x", kind="input", inputs=(), shape=(2, 3, 6, 6)),
            convolution("stem", 0, pixels, 3, windows),
            Operation(name="relu", kind="pointwise", inputs=(1,), shape=pixels),
            convolution("narrow", 2, small, 16),
            Operation(name="norm", kind="batch_norm", inputs=(3,), shape=small),
            convolution("wide", 4, pixels, 4),
            Operation(name="add", kind="pointwise", inputs=(5, 2), shape=pixels),
            Operation(name="mean", kind="average", inputs=(6,), shape=(2, 16, 1, 1)),
            Operation(name="flat", kind="flatten", inputs=(7,), shape=(2, 16)),
            Operation(name="fc", kind="linear", inputs=(8,), shape=(2, 5), weights=(weight("weight", 5, 16),)),
            Operation(name="output", kind="output", inputs=(9,), shape=()),
        )
    )


def convolution(
    name: str,
    source: int,
    shape: tuple[int, ...],
    channels: int,
    windows: tuple[Sliding, ...] = (Sliding(1, 1, 0), Sliding(1, 1, 0)),
) -> Operation:
    kernel = weight("weight", shape[1], channels, windows[0].kernel, windows[1].kernel)
    return Operation(name=name, kind="convolution", inputs=(source,), shape=shape, windows=windows, weights=(kernel,))


def planned(division: DivisionName, *shares: float) -> ReplicaPlan:
    return plan_replica(block(), division, Replica(shares=shares or (1.0, 1.0)))


def states(plan: ReplicaPlan) -> dict[str, str]:
    pairs = zip(plan.network.operations, plan.steps, strict=True)
    return {op.name: step.choice.gives.state for op, step in pairs}


def given(plan: ReplicaPlan, name: str) -> Layout:
    return next(
        step.choice.gives for op, step in zip(plan.network.operations, plan.steps, strict=True) if op.name == name
    )


def moves(plan: ReplicaPlan) -> dict[str, list[tuple[str, str, str]]]:
    pairs = zip(plan.network.operations, plan.steps, strict=True)
    return {op.name: [(m.kind, m.have.state, m.need.state) for m in step.moves] for op, step in pairs if step.moves}


def test_every_column_has_a_rule_for_every_kind() -> None:
    assert set(TABLE) == set(get_args(DivisionName))
    assert all(set(column) == set(get_args(Kind)) for column in TABLE.values())


def test_published_filters_gather_every_output_and_sum_every_gradient() -> None:
    plan = planned("filter")
    assert {plan.divided.choices[name].mode for name in ("stem", "narrow", "wide", "fc")} == {"filter"}
    assert states(plan)["relu"] == states(plan)["norm"] == states(plan)["add"] == "alike"
    gather, again = ("gather", "split", "alike"), ("all-reduce", "alike", "whole")
    assert moves(plan) == {
        "relu": [gather], "narrow": [again], "norm": [gather], "wide": [again], "add": [gather], "fc": [again],
        "output": [gather],
    }  # fmt: skip


def test_published_channels_sum_every_output() -> None:
    plan = planned("channel")
    assert {plan.divided.choices[name].mode for name in ("stem", "narrow", "wide", "fc")} == {"channel"}
    assert moves(plan)["relu"] == [("all-reduce", "partial", "alike")]
    assert moves(plan)["narrow"] == [("gather", "alike", "split")]


def test_hybrid_uses_channels_if_every_rank_gets_one() -> None:
    modes = {name: choice.mode for name, choice in planned("hybrid", 1, 1, 1, 1).divided.choices.items()}
    assert (modes["stem"], modes["narrow"], modes["wide"]) == ("filter", "channel", "channel")


def test_sharded_moves_the_narrow_side_of_a_bottleneck_only() -> None:
    plan = planned("sharded")
    assert [plan.divided.choices[name].mode for name in ("stem", "narrow", "wide")] == ["filter", "channel", "filter"]
    strategy_moves = moves(plan)
    assert strategy_moves["norm"] == [("reduce-scatter", "partial", "split")]
    assert strategy_moves["wide"] == [("gather", "split", "whole")]
    assert {"relu", "narrow", "add", "mean", "flat"}.isdisjoint(strategy_moves)
    narrow = 2 * 4 * 6 * 6
    wide = [move for step in plan.steps for move in step.moves if move.shape[1] == 16 and len(move.shape) == 4]
    assert not [move for move in wide if move.shape[2] > 1], "no wide image travels"
    for name in ("norm", "wide"):
        step = plan.steps[[op.name for op in plan.network.operations].index(name)]
        assert elements(step.moves[0], 0) == elements(step.moves[0], 0, backward=True)
        assert elements(step.moves[0], 0)[0] == narrow / 2


def test_rows_follow_shares_and_a_3x3_kernel_needs_one_more_row() -> None:
    plan = planned("spatial", 4, 2)
    rows = split({2: (((0, 4),), ((4, 6),)), 3: (((0, 6),), ((0, 6),))})
    stem = plan.steps[1].choice
    assert (stem.mode, stem.gives) == ("strip", rows)
    assert stem.needs == (split({2: (((0, 5),), ((3, 6),)), 3: (((0, 6),), ((0, 6),))}),)
    assert (given(plan, "mean"), given(plan, "fc")) == (PARTIAL, ALIKE)


def test_weights_are_divided_only_where_layers_are() -> None:
    plan = planned("sharded", 3, 1)
    stem, narrow = plan.shards["stem.weight"].layout, plan.shards["narrow.weight"].layout
    assert stem == split({0: (((0, 12),), ((12, 16),))})
    assert narrow == split({1: (((0, 12),), ((12, 16),))})
    assert planned("spatial").shards["stem.weight"].layout == WHOLE


def test_a_rank_without_a_share_holds_nothing_and_sends_the_minimum() -> None:
    plan = planned("filter", 1, 0)
    assert plan.shards["stem.weight"].layout == split({0: (((0, 16),), ())})
    arrangement = Arrangement(division="filter", replicas=(Replica(shares=(1, 0)),))
    busy, idle = step_traffic([plan], arrangement, 4)
    assert busy["gather"][0] == idle["gather"][1] > 0
    assert busy["gather"][1] == idle["gather"][0] == 0


def test_replicas_use_one_mode_per_layer_and_sum_their_common_parts() -> None:
    arrangement = Arrangement(division="sharded", replicas=(Replica(shares=(1, 1)), Replica(shares=(1,))))
    first, second = plans = plan_replicas(block(), arrangement)
    assert [c.mode for c in first.divided.choices.values()] == [c.mode for c in second.divided.choices.values()]
    sent = [traffic["gradients"][0] for traffic in step_traffic(plans, arrangement, 4)]
    divided = [s for s in first.shards.values() if s.layout.state == "split"]
    assert divided
    assert sent[2] == pytest.approx(sent[0] + sent[1], rel=0.5)


def test_arrangement_lists_its_ranks_and_refuses_invalid_shares() -> None:
    arrangement = Arrangement(
        division="spatial", replicas=(Replica(shares=(1, 2), columns=(1, 1)), Replica(shares=(1,)))
    )
    assert arrangement.size == 5
    assert [list(arrangement.ranks_of(i)) for i in (0, 1)] == [[0, 1, 2, 3], [4]]
    with pytest.raises(InvalidValue) as caught:
        Arrangement(division="sharded", replicas=(Replica(shares=(1,), columns=(1, 1)),))
    assert caught.value.field == "columns"
    for shares in ((), (0.0,), (1.0, -1.0)):
        with pytest.raises(InvalidValue) as caught:
            Replica(shares=shares)
        assert caught.value.field == "shares"
