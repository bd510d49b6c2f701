"""What takes the time of a predicted step: all parts are the step, and each is there where its cause is."""

from __future__ import annotations

import msgspec
import pytest

from evener.oracle.cost.mesh import price_mesh
from evener.oracle.cost.model import CostModel, TrainingJob
from evener.oracle.cost.partition import Mode
from evener.oracle.cost.pipeline import price_pipeline
from evener.oracle.hypothetical_cluster import hypothetical_profile
from evener.oracle.search import price_stage_teams, search
from evener.oracle.zoo.networks import draw
from evener.records.profile import WidthEfficiency
from support.imagined_machines import cluster, convolutions, model

DIVISIONS: tuple[Mode, ...] = ("filter", "channel", "hybrid", "sharded", "spatial")
NORMED = convolutions(depth=6, width=32, norm=True)


def with_widths(speeds: list[float]) -> CostModel:
    """Devices on which layers of few filters take twice as long as their operations."""
    profile = cluster(speeds)
    widths = (WidthEfficiency(filters=8, efficiency=0.5), WidthEfficiency(filters=32, efficiency=1.0))
    devices = tuple(msgspec.structs.replace(one, widths=widths) for one in profile.devices)
    job = TrainingJob(graph=convolutions(depth=6, width=32), batch_size=64, optimizer="sgd")
    return CostModel(job, msgspec.structs.replace(profile, devices=devices))


@pytest.mark.parametrize("name", ["resnet50", "vgg16"])
@pytest.mark.parametrize("machines", ["a100-node", "v100-node,rtx3090:2", "2xrtx3090,rtx4090"])
def test_parts_of_every_strategy_add_up_to_its_step(name: str, machines: str) -> None:
    job = TrainingJob(graph=draw(name), batch_size=256)
    ranking = search(CostModel(job, hypothetical_profile(machines, "10gbe")))
    assert len(ranking.ranked) > 5
    for estimate in ranking.ranked:
        seconds = estimate.parts.by_kind()
        assert sum(seconds.values()) == pytest.approx(estimate.step_seconds, rel=1e-12)
        assert all(one >= 0 for one in seconds.values()), estimate.strategy
        assert seconds["computing"] > 0


def test_exchanges_are_named_by_what_passes() -> None:
    machines = model([1.0, 0.5], graph=NORMED, alpha=1e-4, beta=1e-8, overlap=False)
    data = price_mesh(machines, [[0], [1]]).parts
    assert data.gradients > 0
    assert data.statistics > 0
    assert data.copies > 0  # into one packed buffer, and back
    assert data.layers == data.stages == data.thin_layers == 0
    for mode in DIVISIONS:
        divided = price_mesh(machines, [[0, 1]], mode).parts
        assert divided.layers > 0
        assert divided.stages == divided.idle == 0
    line = price_pipeline(model([1.0, 1.0], graph=NORMED), [[0, 1]], 4).parts
    assert line.stages > 0
    assert line.idle > 0
    assert line.layers == line.thin_layers == line.slower_ranks == 0


@pytest.mark.parametrize("mode", DIVISIONS)
def test_layers_are_thin_where_narrow_operations_are_slow(mode: Mode) -> None:
    """Half of a layer then takes more than half of the time, by what these devices lose to its width."""
    whole = price_mesh(with_widths([1.0]), [[0]]).parts
    even, thin = (price_mesh(machines([1.0, 1.0]), [[0, 1]], mode).parts for machines in (wide, with_widths))
    assert whole.thin_layers == 0
    assert thin.computing == pytest.approx(even.computing, rel=0.05)  # the first layer reads three channels anyway
    if mode == "spatial":  # which leaves every layer as wide as it was
        assert thin.thin_layers == pytest.approx(even.thin_layers, abs=0.01 * even.computing)
    else:
        assert thin.thin_layers > even.thin_layers + 0.1 * even.computing


def wide(speeds: list[float]) -> CostModel:
    return model(speeds, graph=convolutions(depth=6, width=32))


def test_stages_of_several_devices_have_thin_layers_too() -> None:
    teams = price_stage_teams(with_widths([1.0] * 4), [[0, 1], [2, 3]], "filter", 4)
    plain = price_stage_teams(wide([1.0] * 4), [[0, 1], [2, 3]], "filter", 4)
    assert teams.parts.thin_layers > plain.parts.thin_layers
    assert teams.parts.layers > 0
    assert sum(teams.parts.by_kind().values()) == pytest.approx(teams.step_seconds, rel=1e-12)
