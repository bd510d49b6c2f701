"""The search finds and plans the best strategy and recommends nothing slower than the best device alone."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.oracle.advice import advice, plan_of
from evener.oracle.cost.mesh import price_mesh
from evener.oracle.search import ON_REQUEST_STRATEGIES, meshes, search
from evener.oracle.uncertainty import Uncertainty
from evener.records.errors import DoesNotFit
from evener.records.plan import Plan
from evener.records.schema import read_noun, write_noun
from evener.report.planning_tables import ranking_table
from support.imagined_machines import convolutions, model
from support.refusals import refused

wired = partial(model, alpha=1e-3, beta=1e-6)


def test_equal_devices_on_a_fast_network_share_the_samples() -> None:
    ranking = search(model([1, 1, 1, 1], graph=convolutions(depth=6, width=32), alpha=1e-7, beta=1e-11))
    assert ranking.best.strategy == "data"
    assert len(ranking.best.devices) == 4
    assert ranking.speedup(ranking.best) == pytest.approx(4, rel=0.05)
    assert advice(ranking).startswith("Use data on 4 of 4 devices: ")


def test_a_slow_network_is_not_used() -> None:
    ranking = search(
        wired(
            [1, 0.5],
        )
    )
    assert ranking.best.strategy == "serial"
    assert ranking.best.devices == (0,)
    assert [one.what for one in ranking.rejected if one.what.startswith("node")] == ["node-1"]
    text = advice(ranking)
    assert text.startswith("Train on node-0 cuda:0 alone: ")
    assert "because of" in text
    assert "Averaging after every" in text
    assert text.count(". ") <= 1


def test_unprofitable_device_is_left_out() -> None:
    ranking = search(model([1, 1, 0.001], alpha=1e-7, beta=1e-11))
    assert sorted(ranking.best.devices) == [0, 1]


def test_a_model_too_large_for_one_device_is_divided() -> None:
    graph = convolutions(depth=8, width=128)
    alone = model(graph=graph, batch_size=8)
    room = int(0.7 * alone.whole_state_bytes)
    ranking = search(model([1] * 4, graph=graph, batch_size=8, per_node=4, memory=room))
    assert ranking.alone is None
    assert ranking.speedup(ranking.best) is None
    assert ranking.best.peak_bytes <= room
    assert {one.what: one.reason for one in ranking.rejected}["data"] == "no device holds the model"
    assert "no single device could hold the job" in advice(ranking)


def test_a_model_too_large_for_all_is_refused_with_every_reason() -> None:
    with refused(DoesNotFit):
        search(model([1, 1], memory=1000))


def test_only_requested_strategies_are_priced() -> None:
    ranking = search(model([1, 1], alpha=1e-7, beta=1e-11), ["data"])
    assert {estimate.strategy for estimate in ranking.ranked} == {"data", "serial"}


def test_base_install_plans_for_a_zoo_network() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from evener.oracle.advice import advice\n"
        "from evener.oracle.hypothetical_cluster import hypothetical_profile\n"
        "from evener.oracle.cost.model import CostModel, TrainingJob\n"
        "from evener.oracle.search import search\n"
        "from evener.oracle.zoo.networks import draw\n"
        "job = TrainingJob(graph=draw('resnet152'), batch_size=256)\n"
        "print(advice(search(CostModel(job, hypothetical_profile('4xv100', '100gbe')), ['data'])))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout.startswith("Use data on 4 of 4 devices: "), run.stderr


def test_groups_are_neighbours_or_nodes() -> None:
    team = model([1] * 5, per_node=3)
    assert list(meshes(team, range(5))) == [[[0, 1, 2], [3, 4]]]
    four = model([1] * 4, per_node=2)
    assert list(meshes(four, range(4))) == [[[0, 1], [2, 3]]]
    assert [len(groups) for groups in meshes(model([1] * 16), range(16))] == [8, 4, 2]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(0.05, 4), min_size=1, max_size=5),
    st.floats(1e-8, 1e-3),
    st.floats(1e-12, 1e-7),
    st.integers(1, 3),
)
def test_recommended_devices_are_not_slower_than_their_best_member(
    speeds: list[float], alpha: float, beta: float, per_node: int
) -> None:
    team = model(speeds, graph=convolutions(depth=2, norm=True), alpha=alpha, beta=beta, per_node=per_node)
    ranking = search(team)
    best_alone = min(price_mesh(team, [[device]]).step_seconds for device in range(len(speeds)))
    assert ranking.best.step_seconds <= best_alone * (1 + 1e-9)
    assert ranking.best.strategy not in ON_REQUEST_STRATEGIES
    assert [estimate.step_seconds for estimate in ranking.ranked] == sorted(
        estimate.step_seconds for estimate in ranking.ranked
    )


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(0.1, 4), min_size=2, max_size=4), st.sampled_from([1e-11, 1e-9]))
def test_every_estimate_becomes_a_plan_that_holds_all_samples(speeds: list[float], beta: float) -> None:
    ranking = search(model(speeds, per_node=2, beta=beta, batch_size=30))
    for estimate in ranking.ranked:
        plan = plan_of(ranking, estimate)
        assert plan.strategy == estimate.strategy
        assert {(a.node, a.device) for a in plan.assignments} <= {
            (device.node, device.device) for device in ranking.model.profile.devices
        }
        by_replica = {a.replica: a.samples for a in plan.assignments}
        assert sum(by_replica.values()) * plan.accumulate >= 30


def test_a_plan_gives_reasons_for_rejections_and_survives_a_file(tmp_path: Path) -> None:
    ranking = search(model([1, 0.5], per_node=2, alpha=1e-7, beta=1e-11))
    plan = plan_of(ranking)
    write_noun(plan, tmp_path / "plan.json")
    assert read_noun(tmp_path / "plan.json", Plan) == plan
    assert plan.prediction is not None
    assert plan.prediction.step_seconds == ranking.best.step_seconds
    assert plan.prediction.bottleneck == ranking.best.bottleneck != ""
    reasons = {one.what: one.reason for one in plan.rejected}
    assert reasons["serial"].startswith("slower: ")
    assert any(what.startswith("averaging after every") for what in reasons)
    assert plan.advice == advice(ranking)


def test_stages_of_a_planned_pipeline_name_their_first_layers() -> None:
    ranking = search(model([1, 1], per_node=2), ["pipeline"])
    plan = plan_of(ranking, ranking.ranked[0] if ranking.ranked[0].stages else ranking.ranked[1])
    assert plan.assignments[0].first_layer == "conv0"
    assert plan.assignments[1].first_layer in ranking.model.job.graph.by_name


def test_strategies_that_cannot_be_told_apart_are_named() -> None:
    ranking = search(model([1, 1], graph=convolutions(depth=6, width=32), alpha=1e-6, beta=1e-10))
    others = [one for one in ranking.ranked if one.strategy not in (*ON_REQUEST_STRATEGIES, "data", "serial")]
    assert ranking.best.strategy == "data"
    assert ranking.alike(1.0) == []
    assert ranking.alike(1e9) == others
    factor = 1.0001 * others[1].step_seconds / ranking.best.step_seconds
    assert ranking.alike(factor) == others[:2]
    caption = str(ranking_table(ranking, Uncertainty(spread=0.5, alike=factor - 1)).caption)
    assert f"As fast as data, as far as can be told: {others[0].strategy}, {others[1].strategy}." in caption
    assert "between 1/1.50 and 1.50 times" in caption
    assert "not known" in str(ranking_table(ranking).caption)
    prediction = plan_of(ranking, spread=0.5).prediction
    assert prediction is not None
    assert prediction.interval == pytest.approx((prediction.step_seconds / 1.5, prediction.step_seconds * 1.5))


def test_table_names_unused_devices_once_per_reason() -> None:
    ranking = search(wired([1, 0.5]))
    table = ranking_table(ranking)
    assert len(table.rows) == len(ranking.ranked)
    caption = str(table.caption)
    assert ranking.rejected
    for one in ranking.rejected:
        assert one.what in caption
        assert caption.count(one.reason) == 1
