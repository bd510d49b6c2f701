"""Numbers that are read from a device late."""

from __future__ import annotations

import pytest
import torch

from evener.system.accelerators import HostCopy, on_host
from support import standin
from support.accelerator import DEVICE, needs_device


@pytest.mark.parametrize("value", [1.5, torch.tensor(1.5), torch.tensor([1.5], dtype=torch.float64)])
def test_number_on_the_host_is_read_unchanged(value: float | torch.Tensor) -> None:
    assert HostCopy(value).read() == 1.5


@needs_device
def test_number_is_read_as_it_was_before_the_device_changes_it() -> None:
    value = torch.full((), 2.0, device=DEVICE)
    copies = []
    for _ in range(5):
        copies.append(HostCopy(value * 1))
        value += 1
    assert [copy.read() for copy in copies] == [2.0, 3.0, 4.0, 5.0, 6.0]


@needs_device
@pytest.mark.skipif(not DEVICE.startswith("standin"), reason="needs a device that counts waits")
def test_copy_does_not_wait_for_the_device() -> None:
    value = torch.full((), 2.0, device=DEVICE)
    before = standin.load().waits_of_thread()
    copy = HostCopy(value)
    assert standin.load().waits_of_thread() == before
    assert copy.read() == 2.0


@needs_device
@pytest.mark.skipif(not DEVICE.startswith("standin"), reason="needs a device that counts waits")
def test_tensors_arrive_on_the_host_after_one_wait() -> None:
    tensors = [torch.arange(3.0, device=DEVICE), torch.ones(2), torch.arange(4, device=DEVICE)]
    before = standin.load().waits_of_thread()
    copies = on_host(tensors)
    assert standin.load().waits_of_thread() == before + 1
    assert [copy.tolist() for copy in copies] == [[0, 1, 2], [1, 1], [0, 1, 2, 3]]


@needs_device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, which computes beside the host")
def test_copy_is_read_while_later_work_still_runs() -> None:
    device = torch.device(DEVICE)
    value, work = torch.full((), 2.0, device=device), torch.randn(4096, 4096, device=device)
    float(value)
    copy, done = HostCopy(value), torch.cuda.Event()  # type: ignore[no-untyped-call]
    for _ in range(200):
        work = torch.tanh(work @ work)
    done.record()
    assert copy.read() == 2.0
    assert not done.query()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
