"""What one contribution can do is bounded; what several honest ones agree on is kept."""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from evener.agreements.layout import Flat, flat_of, layout_of
from evener.agreements.messages import Push
from evener.agreements.parameter_server import ParameterServer
from evener.agreements.robust import MAX_FACTOR, NormClipper, exchanges, merge_robustly, nearest, norm_of
from evener.agreements.settings import Robust, Sgd, Workload, asynchronous, average, bounded, diloco, synchronous
from evener.agreements.threads import ThreadPool
from evener.records.errors import InvalidValue
from support.refusals import refused

SGD = Sgd(learning_rate=1.0)
CORES = ThreadPool(1)
ARRAYS: dict[str, Any] = {"w": np.zeros(3, np.float32), "d": np.zeros(2), "n": np.zeros(1, np.int64)}
LAYOUT = layout_of(ARRAYS)


def flat(value: float, count: int = 1) -> Flat:
    arrays: dict[str, Any] = {
        "w": np.full(3, value, np.float32),
        "d": np.full(2, value),
        "n": np.array([count], np.int64),
    }
    return flat_of(LAYOUT, arrays)


def merged(rule: Robust, *values: float) -> dict[str, Any]:
    out = Flat(LAYOUT)
    merge_robustly(rule, out, [flat(value) for value in values], CORES)
    return out.views()


@pytest.mark.parametrize(
    ("rule", "values", "wanted"),
    [
        ("median", (1.0, 2.0, 1000.0), 2.0),
        ("median", (1.0, 2.0, 3.0, -1e30), 1.5),
        ("median", (1.0, 3.0), 2.0),
        ("trimmed", (1.0, 2.0, 3.0, -1e30, 1e30), 2.0),
        ("trimmed", (1.0, 2.0, 4.0), 2.0),
        ("trimmed", (1.0, 3.0), 2.0),
        ("krum", (1.0, 1.5, 2.0, 1e30), 1.5),
        ("krum", (-1e30, 5.0, 5.0, 5.25, 4.0), 5.0),
        ("krum", (1.0, 3.0), 1.0),
    ],
)
def test_robust_rules_give_the_expected_values(rule: Robust, values: tuple[float, ...], wanted: float) -> None:
    found = merged(rule, *values)
    assert found["w"] == pytest.approx([wanted] * 3)
    assert found["d"] == pytest.approx([wanted] * 2)


@pytest.mark.parametrize("count", range(1, 20))
def test_exchanges_sort_all_values_between_the_cuts(count: int) -> None:
    draw = np.random.default_rng(count)
    for cut in (0, 1, (count - 1) // 2):
        for values in draw.permuted(np.tile(np.arange(count), (200, 1)), axis=1).tolist():
            for i, j in exchanges(count, cut):
                values[i], values[j] = min(values[i], values[j]), max(values[i], values[j])
            assert values[cut : count - cut] == list(range(cut, count - cut))


def test_counters_take_the_increment_of_the_median_node() -> None:
    out = Flat(LAYOUT)
    merge_robustly("median", out, [flat(1.0, 2), flat(1.0, 2), flat(1.0, 2**62)], CORES)
    assert out.counters.tolist() == [6]


values = st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=9)


@pytest.mark.parametrize(("rule", "part"), [("median", 0.49), ("trimmed", 0.19), ("krum", 0.0)])
@settings(max_examples=30, deadline=None)
@given(honest=values, bad=st.sampled_from([-(2.0**99), -1.0, 0.0, 1000.0, 2.0**99]))
def test_minority_cannot_move_the_result_beyond_the_honest_values(
    rule: Robust, part: float, honest: list[float], bad: float
) -> None:
    count = max(0 if rule == "trimmed" else 1, int(part * len(honest)))
    if rule == "krum" and 2 * count + 2 >= len(honest) + count:
        count = 0
    found = merged(rule, *honest, *[bad] * count)["d"]
    assert min(honest) - 1e-3 <= found[0] <= max(honest) + 1e-3


def test_krum_selects_a_contribution_from_the_majority() -> None:
    draw = np.random.default_rng(1)
    crowd = [flat(float(value)) for value in draw.normal(0, 0.1, 5)]
    assert nearest([*crowd, flat(9.0), flat(-9.0)], CORES) < 5


def test_clipper_shortens_long_updates_once_the_norm_is_known() -> None:
    clipper = NormClipper()
    early = flat(1e6)
    assert clipper.clip(early) == 1.0
    for _ in range(20):
        assert clipper.clip(flat(1.0)) == 1.0
    long = flat(-1e6)
    assert clipper.clip(long) < 1
    assert norm_of(long) == pytest.approx(MAX_FACTOR * norm_of(flat(1.0)), rel=1e-6)
    assert long.views()["d"][0] < 0
    assert clipper.clip(flat(MAX_FACTOR * 0.9)) == 1.0


@pytest.mark.parametrize("value", [1e30, float("inf"), float("nan")])
def test_overflowing_update_is_clipped_and_non_finite_ones_stay_so(value: float) -> None:
    clipper = NormClipper()
    for _ in range(10):
        clipper.clip(flat(1.0))
    one = flat(value)
    clipper.clip(one)
    assert bool(np.isfinite(one.views()["w"]).all()) is isfinite(value)
    assert norm_of(one) <= 1.01 * MAX_FACTOR * norm_of(flat(1.0)) or not isfinite(value)


def push(server: ParameterServer, name: str, value: float) -> None:
    number = next(iter(server.workers[name].leases))
    inbox = server.inbox(name, number)
    assert inbox is not None
    inbox[:] = flat(value).memory.data
    del inbox
    server.push(name, Push(number=number, seconds=1.0, loss=1.0), LAYOUT.num_bytes)


@pytest.mark.parametrize("rule", ["trimmed", "median", "krum"])
def test_robust_server_follows_the_majority(rule: Robust) -> None:
    agreement = replace(synchronous(batch=8, outer=SGD), robust=rule)
    server = ParameterServer(agreement, Workload(num_samples=800, num_epochs=1), Flat(LAYOUT), cores=CORES, quorum=4)
    for name in "abcd":
        server.admit(name)
    for name, value in (("a", 1.0), ("b", 1.1), ("c", 0.9), ("d", -1e6)):
        push(server, name, value)
    assert server.version == 1
    assert -1.2 < float(server.weights.views()["d"][0]) < -0.8


def test_default_agreements_clip_single_contributions() -> None:
    for made in (asynchronous(batch=8, outer=SGD), bounded(batch=8, outer=SGD), average(batch=8), diloco(batch=8)):
        assert made.robust == "clip"
    assert synchronous(batch=8, outer=SGD).robust == "mean"
    server = ParameterServer(
        asynchronous(batch=8, outer=SGD), Workload(num_samples=800, num_epochs=1), Flat(LAYOUT), cores=CORES
    )
    server.admit("a")
    for _ in range(12):
        push(server, "a", 1.0)
    push(server, "a", -1e6)
    assert float(server.weights.views()["d"][0]) == pytest.approx(-12 + MAX_FACTOR, rel=1e-3)
    assert server.workers["a"].totals.clipped == 1


def test_rule_for_several_contributions_needs_a_synchronous_protocol() -> None:
    with refused(InvalidValue):
        replace(asynchronous(batch=8, outer=SGD), robust="krum")
