"""Evener's access to accelerators, on a machine without one and on those of `support.standin`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evener.system import accelerators
from support import standin

CPU = torch.device("cpu")


def test_vendors_are_named_in_one_module_alone() -> None:
    package = Path(accelerators.__file__).parents[1]
    named = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(word in path.read_text() for word in ("torch.cuda", "torch.mps", "torch.xpu"))
    ]
    assert named == ["system/accelerators.py"]


def test_word_of_a_vendor_stands_in_help_texts_and_the_catalogue_alone() -> None:
    package = Path(accelerators.__file__).parents[1]
    named = [path for path in package.rglob("*.py") if re.search(r"\bcuda\b", path.read_text())]
    help_texts = "config/options.py"
    wanted = {help_texts, "oracle/catalogue.py", "system/accelerators.py"}
    assert {path.relative_to(package).as_posix() for path in named} == wanted


@pytest.mark.parametrize(
    ("device", "is_one", "backend"),
    [("cpu", False, "gloo"), ("cuda:1", True, "nccl"), ("xpu:0", True, "xccl"), ("mps:0", True, None)],
)
def test_capabilities_follow_the_kind_of_a_device(device: str, is_one: bool, backend: str | None) -> None:
    assert accelerators.is_accelerator(device) is is_one
    assert accelerators.capabilities(device).backend == backend
    assert accelerators.common_backend([device, device]) == backend
    assert accelerators.common_backend([device, "cpu"]) is None or not is_one


def test_processor_needs_no_events_and_no_waits() -> None:
    accelerators.use(CPU)
    with accelerators.used(CPU):
        accelerators.synchronize(CPU)
    assert accelerators.marked(CPU) is None
    assert accelerators.memory(CPU) is None
    assert accelerators.generators(CPU) == [torch.default_generator]


def test_random_numbers_are_kept() -> None:
    with accelerators.random_numbers_kept(CPU):
        first = torch.rand(3)
    assert torch.equal(first, torch.rand(3))


ON_STANDIN = """
import torch
from torch import nn
from evener.system import accelerators
from support import standin

library, here, cpu = standin.load(), torch.device("standin:0"), torch.device("cpu")
assert accelerators.names() == ["standin:0", "standin:1"]
assert accelerators.best() == here
can = accelerators.capabilities(here)
assert (can.has_timed_events, can.counts_memory, can.has_pinned_memory, can.backend) == (True, True, True, None)

# events, and waits
before = library.waits()
begin, end = accelerators.marked(here), accelerators.marked(here)
assert library.waits() == before
accelerators.synchronize(here)
assert library.waits() == before + 1
assert begin.elapsed_time(end) >= 0

# memory
base = accelerators.allocated_bytes(here)
accelerators.reset_peak(here)
taken = torch.ones(1000, device=here)
del taken
assert accelerators.allocated_bytes(here) == base
assert accelerators.peak_bytes(here) == base + 4000
total, usable = accelerators.memory(here)
library.limit_memory(0, base + 100)
try:
    torch.ones(1000, device=here)
except torch.OutOfMemoryError:
    pass
else:
    raise AssertionError("there was memory")
library.limit_memory(0, total)

# random numbers of the device alone, also of operators that take no generator
with accelerators.random_numbers_kept(here):
    first = torch.rand(3, device=here)
assert torch.equal(first, torch.rand(3, device=here))
ones, before = torch.ones(9, device=here, requires_grad=True), torch.get_rng_state()
with accelerators.random_numbers_kept(here):
    first = nn.functional.dropout(ones)
assert torch.equal(first, nn.functional.dropout(ones))
assert torch.equal(before, torch.get_rng_state())

# a copy to pinned memory arrives when the host has waited for it
copy = torch.full((1,), 7.0, device=here).to("cpu", non_blocking=True)
assert float(copy) != 7.0
accelerators.synchronize(here)
assert float(copy) == 7.0

# training equals the processor
def trained(device):
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    model = nn.Sequential(*layers).double().to(device)
    x, y = torch.randn(6, 3, 4, 4, dtype=torch.double).to(device), (torch.arange(6) % 5).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [value.cpu() for value in model.state_dict().values()]

assert all(torch.equal(a, b) for a, b in zip(trained(cpu), trained(here)))

for layer in (nn.LSTM, nn.GRU):
    torch.manual_seed(0)
    model, x = layer(3, 4).double(), torch.randn(5, 2, 3, dtype=torch.double)
    results = []
    for device in (cpu, here):
        model = model.to(device)
        model.zero_grad()
        model(x.to(device))[0].square().sum().backward()
        results.append([value.grad.cpu().clone() for value in model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(*results))

# parameters keep their hooks when a model does not move
for device in (cpu, here):
    layer, seen = nn.Linear(2, 1).to(device), []
    layer.weight.register_post_accumulate_grad_hook(seen.append)
    layer.to(device, torch.float64)(torch.ones(3, 2, dtype=torch.float64).to(device)).sum().backward()
    assert len(seen) == 1

# tensors of two devices, and a lost device
for wrong in (lambda: torch.ones(2) + torch.ones(2, device=here), lambda: model(x)):
    try:
        wrong()
    except RuntimeError as error:
        assert "same device" in str(error)
    else:
        raise AssertionError("devices were mixed")
library.lose(1, True)
try:
    torch.ones(2, device="standin:1")
except RuntimeError as error:
    assert "is lost" in str(error)
else:
    raise AssertionError("it was not lost")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(standin.why_not()), reason=standin.why_not() or "can be compiled")
def test_accelerators_in_main_memory_behave_like_devices() -> None:
    path = os.pathsep.join([*standin.PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", ON_STANDIN],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
