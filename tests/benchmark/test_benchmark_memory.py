"""Bandwidth of this machine's memory."""

from __future__ import annotations

import pytest
import torch

from evener.benchmark import memory as memory_module
from evener.benchmark.memory import measure_bandwidth
from evener.errors import InvalidValue

CPU = torch.device("cpu")


def test_two_measures_of_bandwidth_agree_and_are_those_of_main_memory() -> None:
    rates = [measure_bandwidth(CPU, 0.15) for _ in range(3)]
    assert max(rates) < 2 * sorted(rates)[1]
    assert min(rates) > 1e8
    assert max(rates) < 1e13


def test_bandwidth_counts_bytes_read_and_bytes_written_by_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.benchmark.memory.Clock.time", lambda self, work: 0.5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert measure_bandwidth(CPU, 1e-9) == 3 * 2 * (4 << 20) / 0.5


def test_a_cycle_of_copies_is_larger_than_caches_where_memory_allows() -> None:
    pieces = memory_module._pieces(CPU, 1 << 40)
    assert sum(to.nbytes + of.nbytes for to, of in pieces) == 128 << 20
    assert len({part.data_ptr() for pair in pieces for part in pair}) == 2 * len(pieces)


@pytest.mark.parametrize("room", [1, 1000, 1 << 20, 9 << 20])
def test_the_copies_stay_within_the_room_that_they_get(room: int) -> None:
    pieces = memory_module._pieces(CPU, room)
    assert 0 < sum(to.nbytes + of.nbytes for to, of in pieces) <= max(8, room)


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidValue, match="budget_seconds must be positive"):
        measure_bandwidth(CPU, 0)
