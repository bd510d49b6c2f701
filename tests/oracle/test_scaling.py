"""Curves over numbers of devices."""

from __future__ import annotations

import pytest

from evener.oracle.advice import scale
from evener.oracle.cost.model import TrainingJob
from evener.records.errors import InvalidValue
from evener.records.profile import ClusterProfile, LinkProfile
from support.imagined_machines import cluster, convolutions

JOB = TrainingJob(graph=convolutions(depth=6, width=32), batch_size=256, optimizer="sgd")


def test_data_parallelism_scales_until_exchange_equals_computing_time() -> None:
    curves = {curve.strategy: curve for curve in scale(JOB, cluster([1] * 64, beta=1e-9), [1, 2, 4, 8, 16, 32, 64])}
    data = curves["data"]
    assert [point.devices for point in data.points] == [2, 4, 8, 16, 32, 64]
    assert data.points[0].efficiency > 0.9
    efficiencies = [point.efficiency for point in data.points]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert 1 < data.pays_up_to < 64
    assert curves["serial"].pays_up_to == 1


def test_a_strategy_that_cannot_run_has_an_empty_curve() -> None:
    curves = {curve.strategy: curve for curve in scale(JOB, cluster([1, 1]), [1, 2], ["data+spatial", "spatial"])}
    assert curves["data+spatial"].points == ()
    assert curves["data+spatial"].pays_up_to == 0
    assert len(curves["spatial"].points) == 1


def test_measured_links_of_devices_beyond_the_size_are_left_out() -> None:
    profile = ClusterProfile(
        devices=cluster([1, 1, 1]).devices,
        links=(
            LinkProfile(source=0, target=1, alpha=1e-6, beta=1e-10),
            LinkProfile(source=1, target=2, alpha=1, beta=1),
        ),
    )
    (data,) = scale(JOB, profile, [2, 3], ["data"])
    assert data.points[0].estimate.step_seconds < 1 < data.points[1].estimate.step_seconds
    assert data.pays_up_to == 2


def test_a_size_beyond_the_number_of_devices_is_refused() -> None:
    with pytest.raises(InvalidValue) as caught:
        scale(JOB, cluster([1, 1]), [1, 2, 4])
    assert (caught.value.field, caught.value.value) == ("--scale", 4)
