"""All cores work at once, each thread by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from evener.benchmark.timing import num_workers, run_threaded

CPU = torch.device("cpu")


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_all_pytorch_threads_run_concurrently_with_serial_operators() -> None:
    meeting = threading.Barrier(3)

    def work() -> tuple[int, int]:
        meeting.wait(timeout=20)  # passed only if all three are here at once
        torch.rand(300, 300) @ torch.rand(300, 300)
        return threading.get_ident(), torch.get_num_threads()

    idents, threads = zip(*run_threaded(CPU, work), strict=True)
    assert len(set(idents)) == 3
    assert set(threads) == {1}
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_error_in_a_thread_is_raised_and_thread_settings_are_restored() -> None:
    def work() -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        run_threaded(CPU, work)
    assert torch.get_num_threads() == 3


def test_gpu_is_driven_by_the_calling_thread_only() -> None:
    assert num_workers(torch.device("cuda:0")) == 1
    assert run_threaded(torch.device("cuda:0"), threading.get_ident) == [threading.get_ident()]
