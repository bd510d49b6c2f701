"""Replicas that agree less often, or by a server."""

from __future__ import annotations

from functools import partial

import pytest

from evener.oracle.cost.averaging import price_averaging, price_server
from evener.oracle.cost.topology import all_reduce_seconds
from support.imagined_machines import model

slow = partial(model, alpha=1e-3, beta=1e-7)


def test_averaging_pays_for_the_exchange_once_in_so_many_steps() -> None:
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


def test_a_server_waits_for_the_slowest_and_its_one_link_serves_all() -> None:
    team = slow(
        [1, 1, 1],
    )
    estimate = price_server(team, [0, 1, 2], 0, asynchronous=False)
    assert estimate.strategy == "server"
    assert estimate.communication_seconds == pytest.approx(2 * ((2e-3 + 1e-3 * 0) / 2 + team.parameter_bytes * 2e-7))
    assert estimate.sent_bytes == team.parameter_bytes


def test_nobody_waits_for_a_slow_device_of_an_asynchronous_server() -> None:
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
