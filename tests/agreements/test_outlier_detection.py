"""Who works against all others is found; who is only different is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evener.agreements.aggregator import OUTLIER
from evener.agreements.layout import Flat, flat_of, layout_of
from evener.agreements.messages import Judgement, Push
from evener.agreements.outlier_detection import STRIKES, OutlierDetector
from evener.agreements.parameter_server import ParameterServer
from evener.agreements.settings import AgreementSettings, Sgd, Workload, asynchronous, diloco, synchronous

SIZE = 3000
LAYOUT = layout_of({"w": np.zeros(SIZE)})
TRUTH = np.random.default_rng(0).standard_normal(SIZE)


def flat(values: NDArray[np.float64]) -> Flat:
    return flat_of(LAYOUT, {"w": values})


def gradient(draw: np.random.Generator, num_samples: int, noise: float = 3.0) -> NDArray[np.float64]:
    """The mean over some samples, each of which is the truth and noise."""
    mean: NDArray[np.float64] = TRUTH + noise * draw.standard_normal(SIZE) / np.sqrt(num_samples)
    return mean


Contribution = tuple[str, Flat, int]


def rounds(detector: OutlierDetector, count: int, made: Any) -> list[list[int]]:
    draw = np.random.default_rng(1)
    return [detector.examine(made(draw, number)) for number in range(count)]


def test_node_with_flipped_gradients_is_detected_from_the_first_round() -> None:
    def made(draw: np.random.Generator, _: int) -> list[Contribution]:
        scales = {"a": 1.0, "b": 1.0, "evil": -10.0, "c": 1.0}
        return [(name, flat(scale * gradient(draw, 16)), 16) for name, scale in scales.items()]

    detector = OutlierDetector()
    assert rounds(detector, STRIKES, made) == [[2]] * STRIKES
    assert detector.is_faulty("evil")
    assert not detector.is_faulty("a")


@pytest.mark.parametrize("sizes", [(1, 100, 100), (1, 10, 1000, 30), (2, 2, 2, 2)])
def test_small_noisy_shares_are_not_outliers(sizes: tuple[int, ...]) -> None:
    def made(draw: np.random.Generator, _: int) -> list[Contribution]:
        return [(str(i), flat(gradient(draw, n, noise=300.0)), n) for i, n in enumerate(sizes)]

    assert not any(rounds(OutlierDetector(), 300, made))


def test_many_local_steps_are_not_an_outlier() -> None:
    def made(draw: np.random.Generator, _: int) -> list[Contribution]:
        sizes = {"a": 1, "b": 2, "fast": 40}
        return [(name, flat(n * gradient(draw, 1, noise=300.0)), n) for name, n in sizes.items()]

    assert not any(rounds(OutlierDetector(), 100, made))


def test_jump_of_all_nodes_marks_none_as_faulty() -> None:
    def made(draw: np.random.Generator, number: int) -> list[Contribution]:
        scale = (1.0, -100.0)[number >= 20]
        return [(name, flat(scale * gradient(draw, 16)), 16) for name in "abcd"]

    detector = OutlierDetector()
    found = rounds(detector, 40, made)
    assert sum(map(len, found)) < STRIKES
    assert not any(detector.is_faulty(name) for name in "abcd")


def test_long_step_in_the_common_direction_is_not_rejected() -> None:
    def made(draw: np.random.Generator, _: int) -> list[Contribution]:
        return [(name, flat(scale * gradient(draw, 16)), 16) for name, scale in (("a", 1), ("b", 1), ("c", 20))]

    assert not any(rounds(OutlierDetector(), 20, made))


def test_two_nodes_never_yield_an_outlier() -> None:
    def made(draw: np.random.Generator, _: int) -> list[Contribution]:
        return [(name, flat(scale * gradient(draw, 16)), 16) for name, scale in (("a", 1), ("evil", -10))]

    assert not any(rounds(OutlierDetector(), 20, made))


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, 1e300])
def test_contributions_without_a_usable_norm_yield_no_outlier(value: float) -> None:
    detector = OutlierDetector()
    for _ in range(5):
        assert detector.examine([(name, flat(np.full(SIZE, value)), 16) for name in "abc"]) == []


CASES = {
    "sync": synchronous(batch=16, outer=Sgd(learning_rate=1.0)),
    "async": asynchronous(batch=4, outer=Sgd(learning_rate=0.25)),
    "diloco": diloco(batch=4, local_steps=1),
}


@pytest.mark.parametrize("agreement", CASES.values(), ids=CASES)
def test_server_rejects_opposed_contributions_and_expels_their_node(agreement: AgreementSettings) -> None:
    server = ParameterServer(agreement, Workload(num_samples=16_000, num_updates=40), Flat(LAYOUT), quorum=4)
    for name in "abcd":
        server.admit(name)
    draw, found = np.random.default_rng(2), list[Judgement]()
    while not any(one.expels for one in found):
        for name in "abcd":
            found += push(server, name, (-10.0 if name == "d" else 1.0) * gradient(draw, 4))
    refused = [one for one in found if one.verdict == "refused"]
    assert {(one.worker, one.reason) for one in refused} == {("d", OUTLIER)}
    assert [one.expels for one in refused] == [False] * (STRIKES - 1) + [True]
    assert server.version <= 10
    assert server.workers["d"].totals.refused == STRIKES


def push(server: ParameterServer, name: str, values: NDArray[np.float64]) -> list[Judgement]:
    number = next(iter(server.workers[name].leases))
    inbox = server.inbox(name, number)
    assert inbox is not None
    inbox[:] = flat(values).memory.data
    del inbox
    return server.push(name, Push(number=number, seconds=1.0, loss=1.0), LAYOUT.num_bytes).judgements


TWO = layout_of({"w": np.zeros(SIZE, np.float32), "b": np.zeros(7, np.float32)})


def half_right(draw: np.random.Generator, times: float) -> NDArray[np.float64]:
    """As much of the truth as of noise, so many times too long."""
    noise = draw.standard_normal(SIZE)
    mixed: NDArray[np.float64] = times * (TRUTH / np.linalg.norm(TRUTH) + noise / np.linalg.norm(noise))
    return np.linalg.norm(TRUTH) * mixed


@pytest.mark.parametrize("times", [1e3, 1e6, 1e30])
@pytest.mark.parametrize("others", [2, 3, 6])
def test_overlong_contribution_is_rejected_even_if_half_is_correct(times: float, others: int) -> None:
    def made(draw: np.random.Generator, _: int) -> list[Contribution]:
        honest = [(f"{i}", flat(gradient(draw, 16)), 16) for i in range(others)]
        return [*honest, ("evil", flat(half_right(draw, times)), 16)]

    found = rounds(OutlierDetector(), 45, made)
    assert found[7:] == [[others]] * 38
    assert found[:7] == [[others] if times > 1e4 else []] * 7


def test_contribution_overlong_in_one_small_array_is_rejected() -> None:
    def made(draw: np.random.Generator, _: int) -> list[Contribution]:
        def one(times: float) -> Flat:
            values = {"w": gradient(draw, 16).astype(np.float32), "b": np.full(7, times, np.float32)}
            return flat_of(TWO, values)

        return [("a", one(1.0), 16), ("b", one(1.0), 16), ("evil", one(1e6), 16)]

    assert rounds(OutlierDetector(), 45, made) == [[2]] * 45


def test_two_outliers_of_five_do_not_hide_each_other() -> None:
    def made(draw: np.random.Generator, _: int) -> list[Contribution]:
        honest = [(f"{i}", flat(gradient(draw, 16)), 16) for i in range(3)]
        return [*honest, *((name, flat(half_right(draw, 1e6)), 16) for name in ("evil", "vile"))]

    assert rounds(OutlierDetector(), 10, made) == [[3, 4]] * 10


def test_outliers_that_arrive_singly_are_rejected_with_three_workers() -> None:
    draw, detector = np.random.default_rng(1), OutlierDetector()
    found = []
    for _ in range(45):
        for name in ("a", "b", "evil"):
            values = half_right(draw, 1e6) if name == "evil" else gradient(draw, 16)
            found.append((name, detector.examine([(name, flat(values), 16)])))
    assert [one for name, one in found if name == "evil"] == [[0]] * 45
    assert not any(one for name, one in found if name != "evil")


def test_rare_large_gradients_of_a_trained_model_are_not_outliers() -> None:
    def made(draw: np.random.Generator, number: int) -> list[Contribution]:
        hit = number % 40, number % 8 == 3
        return [
            (name, flat((5e3 if hit[1] and hit[0] // 8 == i else 1.0) * gradient(draw, 16)), 16)
            for i, name in enumerate("abcd")
        ]

    assert not any(rounds(OutlierDetector(), 200, made))
