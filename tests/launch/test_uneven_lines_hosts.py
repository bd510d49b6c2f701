"""Ranks of a launcher whose lines differ divide sums of gradients: equal weights, fewer bytes on slow lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from hosts import Host, fixture
from hosts.fixture import Build

build_hosts = fixture.build_hosts
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TASK = """
import time
import torch
from torch import nn
from evener import Task

class Slow(nn.Module):  # a sample takes 20 ms, in which the node idles
    def forward(self, x):
        time.sleep(0.02 * len(x))
        return x

def data():
    inputs = torch.randn(640, 20, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())

def task():
    return Task(
        name="slow",
        model=lambda: nn.Sequential(Slow(), nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 2)),
        loss=nn.functional.cross_entropy,
        train_data=data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        batch_size=64,
    )
"""
OPTIONS = ("--precision", "fp64", "--epochs", "1", "--no-check")
PLACE = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "EVENER_SECRET": "0123456789abcdef",
    "GLOO_SOCKET_IFNAME": "eth0",
    "PYTHONUNBUFFERED": "1",
    "MASTER_PORT": "29556",
}


PROGRAM = """
import sys
import time
import evener
import torch
from safetensors.torch import save_file
from torch import nn

run = evener.join()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
inputs = torch.randn(320, 20)
data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for epoch in run.epochs(2):
    for x, y in loader:
        time.sleep(0.01 * len(x))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
if run.leader:
    save_file(run.state(model), sys.argv[1] + "/model.safetensors")
"""


def run_ranks(build_hosts: Build, folder: Path, mbit: Sequence[float], command_of: Callable[[Path], list[str]]) -> None:
    """Run a command on a host behind each line, as a launcher would; each has a folder of its own."""
    with build_hosts(*(Host(name=f"h{rank}", mbit=rate) for rank, rate in enumerate(mbit))) as hosts:
        place = PLACE | {"MASTER_ADDR": hosts["h0"].address, "WORLD_SIZE": str(len(mbit))}
        ranks = []
        for rank, name in enumerate(hosts):
            own = {"RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            (folder / name).mkdir()
            ranks.append(hosts[name].start(command_of(folder / name), environment=place | own, cwd=folder))
        for process in ranks:
            assert process.wait(120) == 0, process.text


def run_program(folder: Path) -> list[str]:
    return [sys.executable, "-m", "evener", "run", "program.py", "--run-folder", str(folder), str(folder)]


def train(build_hosts: Build, folder: Path, *mbit: float, shares: str = "measured") -> TrainRecord:
    """The record of a run with a rank behind each line."""
    (folder / "slow.py").write_text(TASK)
    command = [sys.executable, "-m", "evener", "train", "slow.py", *OPTIONS, "--shares", shares]
    run_ranks(build_hosts, folder, mbit, lambda own: [*command, "--output", str(own)])
    return read_noun(folder / "h0" / "record.json", TrainRecord)


@pytest.mark.parametrize("shares", ["measured", "1,1,1,1"])
def test_slow_line_carries_fewer_bytes_and_weights_are_the_same(
    build_hosts: Build, tmp_path: Path, shares: str
) -> None:
    (tmp_path / "uneven").mkdir()
    (tmp_path / "alone").mkdir()
    uneven = train(build_hosts, tmp_path / "uneven", 1000, 1000, 1000, 100, shares=shares)
    train(build_hosts, tmp_path / "alone", 400)
    rates = [uneven.plan.line_rates[one.node] for one in uneven.plan.assignments]
    assert min(rates[:3]) > 3 * rates[3]
    assert rates[3] == pytest.approx(100e6 / 8, rel=0.2)
    one, other = (load_file(tmp_path / name / "h0" / "model.safetensors") for name in ("alone", "uneven"))
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-10
    gradients = sum(value.nbytes for value in one.values())
    sent = [node.sent_bytes for node in uneven.steps[3].nodes]
    assert sent[3] == pytest.approx(gradients, rel=1e-3)  # in a ring: 1.5 times
    assert uneven.plan.prediction is not None
    assert uneven.plan.prediction.sent_bytes == pytest.approx(max(sent), rel=1e-3)


def test_program_divides_its_sums_of_gradients_by_lines(build_hosts: Build, tmp_path: Path) -> None:
    for name, mbit in (("uneven", (1000, 1000, 1000, 100)), ("alone", (400,))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "program.py").write_text(PROGRAM)
        run_ranks(build_hosts, folder, mbit, run_program)
    record = read_noun(tmp_path / "uneven" / "h0" / "record.json", TrainRecord)
    rates = [record.plan.line_rates[one.node] for one in record.plan.assignments]
    assert min(rates[:3]) > 3 * rates[3]
    one, other = (load_file(tmp_path / name / "h0" / "model.safetensors") for name in ("alone", "uneven"))
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-10
    gradients = sum(value.nbytes for value in one.values())
    assert record.steps[3].nodes[3].sent_bytes == pytest.approx(gradients, rel=0.01)  # in a ring: 1.5 times


def test_equal_lines_keep_a_ring(build_hosts: Build, tmp_path: Path) -> None:
    record = train(build_hosts, tmp_path, 100, 100, 100)
    assert record.plan.line_rates == {}
