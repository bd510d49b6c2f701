"""Data parallelism, divisions and meshes of both: prices by hand, and laws that hold for all."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from math import inf, isclose

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.oracle.apportion import fewest_micro_batches
from evener.oracle.cost.mesh import price_averaging, price_mesh, price_server
from evener.oracle.cost.model import CostModel
from evener.oracle.cost.partition import MODES, Mode
from evener.oracle.cost.replica import ReplicaCost, exposed_seconds
from evener.oracle.cost.topology import LinkCost, all_reduce_seconds
from evener.records.errors import DoesNotFit
from evener.records.profile import ClusterProfile
from support.imagined_machines import convolutions, model
from support.refusals import refused

free = partial(model, alpha=0.0, beta=0.0)
slow = partial(model, alpha=1e-3, beta=1e-7)


def test_lone_device_takes_the_seconds_of_its_worker() -> None:
    alone = model()
    estimate = price_mesh(alone, [[0]])
    assert estimate.strategy == "serial"
    assert estimate.step_seconds == pytest.approx(alone.workers[0].seconds(64))
    assert estimate.communication_seconds == estimate.sent_bytes == 0


def test_twice_the_devices_take_half_the_time_on_a_free_network() -> None:
    estimate, two = (
        price_mesh(free(), [[0]]),
        price_mesh(
            free(
                [1, 1],
            ),
            [[0], [1]],
        ),
    )
    fixed = model().workers[0].fixed_seconds
    assert two.strategy == "data"
    assert two.step_seconds == pytest.approx((estimate.step_seconds - fixed) / 2 + fixed)


def test_samples_follow_the_speeds() -> None:
    assert price_mesh(
        free(
            [1.0, 0.5, 0.25],
            batch_size=56,
        ),
        [[0], [1], [2]],
    ).samples == (32, 16, 8)


def test_exchange_without_overlap_adds_its_full_time_and_packing() -> None:
    team = model([1, 1], overlap=False, alpha=1e-3, beta=1e-8)
    nbytes = team.parameter_bytes
    estimate = price_mesh(team, [[0], [1]])
    assert estimate.communication_seconds == pytest.approx(all_reduce_seconds(nbytes, 2, 1e-3, 1e-8))
    assert estimate.compute_seconds == pytest.approx(team.workers[0].seconds(32) + 4 * nbytes / 100e9)
    assert estimate.sent_bytes == nbytes


def test_filter_waits_for_the_slowest_rank_of_every_layer() -> None:
    even = price_mesh(
        free(
            [1, 1],
        ),
        [[0, 1]],
        "filter",
    )
    assert even.strategy == "filter"
    assert even.samples == (64, 64)
    assert even.waiting_seconds == pytest.approx(0, abs=1e-12)
    uneven = price_mesh(
        free(
            [1, 0.3],
        ),
        [[0, 1]],
        "filter",
    )
    assert uneven.waiting_seconds > 0
    assert uneven.shares == pytest.approx((1 / 1.3, 0.3 / 1.3))


def test_a_mesh_has_groups_that_hold_one_model_each() -> None:
    estimate = price_mesh(model([1] * 5, per_node=5), [[0, 1, 2], [3, 4]], "spatial")
    assert estimate.strategy == "data+spatial"
    assert estimate.replicas == (0, 0, 0, 1, 1)
    assert estimate.samples[0] == estimate.samples[2] > estimate.samples[3] == estimate.samples[4]
    assert estimate.samples[0] + estimate.samples[3] == 64


def test_strips_hold_less_memory_and_filters_hold_fewer_weights() -> None:
    four = model([1] * 4, graph=convolutions(depth=12, width=64, rows=32), per_node=4, batch_size=4)
    strips, filters = (ReplicaCost(four, range(4), mode, LinkCost(0.0, 0.0)) for mode in ("spatial", "filter"))
    assert strips.sample_bytes[1] < 0.4 * four.whole_sample_bytes  # the last layer's input is gathered
    assert strips.state_bytes[1] == four.whole_state_bytes
    assert filters.state_bytes[1] == pytest.approx(four.whole_state_bytes / 4, rel=0.01)


def test_batch_that_does_not_fit_uses_the_fewest_micro_batches() -> None:
    assert fewest_micro_batches(64, [None]) == 1
    assert fewest_micro_batches(64, [10, 20]) == 4
    with pytest.raises(DoesNotFit):
        fewest_micro_batches(64, [10, 0])
    team = model()
    room = int(team.whole_state_bytes + 20 * team.whole_sample_bytes)
    estimate = price_mesh(model(memory=room), [[0]])
    assert estimate.accumulate == 4
    assert estimate.peak_bytes <= room
    assert estimate.step_seconds > price_mesh(team, [[0]]).step_seconds


def test_error_for_a_model_that_fits_nowhere_names_the_devices() -> None:
    with refused(DoesNotFit):
        price_mesh(model([1, 1], per_node=2, memory=1000), [[0, 1]], "filter")


def test_slowest_of_many_equal_devices_is_slower_than_their_mean() -> None:
    team = model([1] * 8)
    assert team.stretch(range(8)) == 1.0
    devices = tuple(msgspec.structs.replace(device, spread=0.01) for device in team.profile.devices)
    spread = CostModel(team.job, ClusterProfile(devices=devices, fabrics=team.profile.fabrics))
    assert spread.stretch(range(8)) == pytest.approx(1.0142, abs=2e-4)  # tables: 1.4236 deviations
    assert spread.stretch([0]) == 1.0


def test_buckets_are_sent_during_the_backward_pass() -> None:
    channel = LinkCost(0.0, 1.0)
    gradients, backward = np.array([4.0, 4.0, 4.0]), np.array([10.0, 10.0, 10.0])
    assert exposed_seconds(gradients, backward, 4, 2, channel) == pytest.approx(4.0)  # the first layer's, at the end
    assert exposed_seconds(gradients, backward, 100, 2, channel) == pytest.approx(12.0)  # one bucket for all
    assert exposed_seconds(gradients, backward / 10, 4, 2, channel) == pytest.approx(1 + 12 - 3)  # the wire is busy


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), min_size=1, max_size=8),
    st.integers(1, 100),
    st.integers(2, 9),
)
def test_exposed_time_lies_between_the_last_bucket_and_the_total(
    layers: list[tuple[float, float]], bucket: int, size: int
) -> None:
    gradients, backward = (np.array(column) for column in zip(*layers, strict=True))
    channel = LinkCost(0.0, 0.5)
    exposed = exposed_seconds(gradients, backward, bucket, size, channel)
    total = all_reduce_seconds(float(gradients.sum()), size, channel.alpha, channel.beta)
    assert -1e-9 <= exposed <= total + 1e-9
    assert exposed >= total - backward.sum() - 1e-9


@settings(max_examples=40)
@given(
    st.lists(st.floats(0.1, 4), min_size=4, max_size=4),
    st.sampled_from(MODES),
    st.floats(0, 1e-4),
    st.floats(0, 1e-8),
    st.floats(0.5, 4.0),
)
def test_only_ratios_of_times_matter(speeds: list[float], mode: Mode, alpha: float, beta: float, factor: float) -> None:
    estimate = price_mesh(model(speeds, alpha=alpha, beta=beta), [[0, 1], [2, 3]], mode)
    other = price_mesh(
        model([s / factor for s in speeds], alpha=alpha * factor, beta=beta * factor), [[0, 1], [2, 3]], mode
    )
    assert other.step_seconds == pytest.approx(factor * estimate.step_seconds, rel=1e-6)
    assert other.shares == pytest.approx(estimate.shares)


@settings(max_examples=40)
@given(st.sampled_from(("none", *MODES)), st.integers(1, 64), st.integers(1, 64))
def test_more_memory_never_makes_a_step_longer(mode: Mode, few: int, more: int) -> None:
    groups = [[0], [1]] if mode == "none" else [[0, 1]]
    base = model([1, 0.5], per_node=2)

    def seconds(samples: int) -> float:
        room = int(base.whole_state_bytes + samples * base.whole_sample_bytes)
        try:
            return price_mesh(model([1, 0.5], per_node=2, memory=room), groups, mode).step_seconds
        except DoesNotFit:
            return inf

    assert seconds(few + more) <= seconds(few) * (1 + 1e-9)


@settings(max_examples=40)
@given(st.lists(st.floats(0.1, 4), min_size=2, max_size=5))
def test_a_faster_device_never_gets_fewer_samples(speeds: list[float]) -> None:
    samples = price_mesh(
        free(
            speeds,
            batch_size=50,
        ),
        [[i] for i in range(len(speeds))],
    ).samples
    ordered = sorted(zip(speeds, samples, strict=True))
    assert sum(samples) == 50
    assert all(a[1] <= b[1] or isclose(a[0], b[0], rel_tol=1e-12) for a, b in pairwise(ordered))


def test_averaging_divides_the_exchange_cost_by_its_interval() -> None:
    team = slow(
        [1, 1],
    )
    exchange = all_reduce_seconds(team.parameter_bytes, 2, 1e-3, 1e-7)
    estimates = [price_averaging(team, [0, 1], steps) for steps in (1, 10)]
    assert [estimate.communication_seconds for estimate in estimates] == pytest.approx([exchange, exchange / 10])
    assert estimates[0].compute_seconds == estimates[1].compute_seconds == pytest.approx(team.workers[0].seconds(32))
    assert estimates[1].local_steps == 10
    assert estimates[1].sent_bytes == round(team.parameter_bytes / 10)
    assert estimates[1].peak_bytes == pytest.approx(
        team.whole_state_bytes + 2 * team.parameter_bytes + 32 * team.whole_sample_bytes
    )


def test_server_waits_for_the_slowest_and_its_link_is_shared() -> None:
    team = slow(
        [1, 1, 1],
    )
    estimate = price_server(team, [0, 1, 2], 0, asynchronous=False)
    assert estimate.strategy == "server"
    assert estimate.communication_seconds == pytest.approx(2 * ((2e-3 + 1e-3 * 0) / 2 + team.parameter_bytes * 2e-7))
    assert estimate.sent_bytes == team.parameter_bytes


def test_asynchronous_devices_do_not_wait_for_a_slow_one() -> None:
    team = model([1, 1, 1, 0.1], alpha=0.0, beta=1e-12)
    synchronous, free = (price_server(team, range(4), 0, asynchronous=flag) for flag in (False, True))
    assert free.samples == (16,) * 4
    rate = sum(1 / team.workers[i].seconds(16) for i in range(4))
    assert free.step_seconds == pytest.approx(4 / rate, rel=1e-3)
    assert synchronous.samples[3] < 4


def test_an_asynchronous_server_is_no_faster_than_its_link() -> None:
    team = slow(
        [1] * 8,
    )
    estimate = price_server(team, range(8), 0, asynchronous=True)
    assert estimate.step_seconds == pytest.approx(team.parameter_bytes * 7 * 1e-7, rel=0.01)
    assert estimate.waiting_seconds > estimate.compute_seconds
    assert "server's link" in estimate.bottleneck


def test_replicas_accumulate_where_their_batch_does_not_fit() -> None:
    base = model([1, 1])
    room = int(base.whole_state_bytes + 10 * base.whole_sample_bytes)
    estimate = price_averaging(model([1, 1], memory=room), [0, 1], 5)
    assert estimate.accumulate == 4
    assert estimate.samples == (8, 8)
