"""Link measurements before a plan: all-reduces, small messages, tensors from rank to rank."""

import pytest

from evener.benchmark import exchanges
from evener.benchmark.exchanges import Sums, measure_all_reduce, measure_small_exchange, measure_sums
from evener.benchmark.links import measure_lines, measure_message
from evener.comm.group import Group
from support.thread_ranks import together


def test_all_ranks_get_the_same_message_seconds() -> None:
    def rank(group: Group) -> list[float]:
        return [measure_message(group, 0, 1, 64), measure_message(group, 2, 1, 8 * 2**20)]

    first, *others = together(3, rank)
    assert all(other == first for other in others)
    assert 0 < first[0] < first[1]  # 8 MiB take longer than 64 bytes


def test_alpha_and_beta_are_those_of_the_slowest_rank() -> None:
    def rank(group: Group) -> tuple[float, float, float]:
        return *measure_all_reduce(group, 2**20), measure_small_exchange(group)

    first, second = together(2, rank)
    assert first == second
    assert min(first[0], first[2]) > 0


def test_a_single_rank_measures_nothing() -> None:
    assert together(1, lambda group: (*measure_all_reduce(group, 2**20), measure_small_exchange(group))) == [
        (0.0, 0.0, 0.0)
    ]


def test_all_ranks_know_the_rate_of_every_line() -> None:
    first, *others = together(3, lambda group: measure_lines(group, ["a", "b", "a"]))
    assert all(other == first for other in others)
    assert min(first) > 1e6


@pytest.mark.parametrize("why", ["accelerators", "one machine", "few bytes"])
def test_lines_are_not_measured_where_sums_stay_in_a_ring(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def refuse(*_: object) -> list[float]:
        raise AssertionError("lines are measured")

    monkeypatch.setattr(exchanges, "measure_lines", refuse)
    if why == "accelerators":
        monkeypatch.setattr(Group, "has_accelerators", True)
    hosts = "aaa" if why == "one machine" else "abc"

    def rank(group: Group) -> Sums:
        return measure_sums(group, 1000 if why == "few bytes" else 2**20, hosts)

    for sums in together(3, rank):
        assert sums.ring == (sums.alpha, sums.beta)
        assert not sums.line_rates
