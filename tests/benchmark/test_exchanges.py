"""Link measurements before a plan: all-reduces, small messages, tensors from rank to rank."""

from evener.benchmark.exchanges import measure_all_reduce, measure_small_exchange
from evener.benchmark.links import measure_message
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
