"""What a program does differently from one process only later is found while it trains."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.frontends.programs import later_comparisons
from evener.frontends.programs.entry import end_copy, finish
from evener.frontends.programs.later_comparisons import LaterComparisons, Report, _Begun
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.records.errors import EvenerError, NotExact
from evener.records.events import RunEvent
from evener.records.record import Event
from programs.suite import perform, run_of

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evener

run = evener.join()
X = torch.randn(64, 4)
Y = X.sum(1, keepdim=True)
model = nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
"""
RARE = """
labels = (torch.arange(64) == 5).long()
loader = DataLoader(TensorDataset(X, labels), batch_size=16, shuffle=True, num_workers={workers})
model, optimizer, loader = run.prepare(model, optimizer, loader)
for epoch in run.epochs(6):
    for x, y in loader:
        optimizer.zero_grad()
        weight = torch.tensor([1.0, 8.0])
        F.cross_entropy(model(x), y, {weights}).backward()
        optimizer.step()
results = model.state_dict()
"""
FOLLOWING = """
loader = DataLoader(TensorDataset(X, torch.cat([Y, 3 * Y], 1)), batch_size=16, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)
weights = torch.ones(2)
for epoch in run.epochs(4):
    sums = torch.zeros(2)
    for x, y in loader:
        optimizer.zero_grad()
        errors = (model(x) - y).square().mean(0)
        (errors * weights).sum().backward()
        optimizer.step()
        sums += {seen}
    weights = 2 * sums / sums.sum()
results = model.state_dict()
"""
CHANGING = """
labels = (X[:, 0] > 0).long()
loader = DataLoader(TensorDataset(X, labels, Y), batch_size=16, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for epoch in {epochs}:
    for x, labels, y in loader:
        optimizer.zero_grad()
        {loss}
        loss.backward()
        optimizer.step()
results = model.state_dict()
"""
CHANGES = {
    "a sum instead of a mean": (
        "range(9)",
        "loss = F.cross_entropy(model(x), labels, reduction='mean' if epoch < 6 else 'sum')",
    ),
    "only the hardest samples": (
        "range(9)",
        "each = F.cross_entropy(model(x), labels, reduction='none'); "
        "loss = each.mean() if epoch < 6 else each.topk(-(-len(each) // 2)).values.mean()",
    ),
    "targets centred by the batch, in the last epoch": (
        "run.epochs(7)",
        "y = y if epoch < 6 else y - y.mean(); loss = (model(x)[:, :1] - y).square().mean()",
    ),
}
TABLE = """
loader = DataLoader(TensorDataset(torch.arange(64), X, torch.cat([Y, 3 * Y], 1)), batch_size=8, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)
table = torch.zeros(64, 2)
for epoch in run.epochs(5):
    for index, x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        target = (y + table[index]) / 2 if epoch >= 2 else y
        (output - target).square().mean().backward()
        optimizer.step()
        {learn}
results = model.state_dict()
"""


def rank_of_program(env: RankEnvironment, work: tuple[str, str]) -> None:
    """A rank that writes how it was refused."""
    text, folder = work
    run = run_of(env, "3,1")
    try:
        perform(text, "program")
        finish(run, env)
    except NotExact as error:
        (Path(folder) / f"{env.rank}.txt").write_text(str(error))
        raise


def refusals(text: str, folder: Path) -> list[str]:
    """The sentences with which every rank refused a program; none if it was trained."""
    nodes = [NodeSpec(name=f"node-{i}", threads=1) for i in range(2)]
    with contextlib.suppress(EvenerError):
        run_local(rank_of_program, nodes, (HEAD + text, str(folder)), patience=10, on_event=lambda _: None)
    return [path.read_text() for path in sorted(folder.glob("*.txt"))]


@pytest.mark.timeout(100)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_late_check_detects_class_weights_of_a_rare_class(workers: int, tmp_path: Path) -> None:
    found = refusals(RARE.format(weights="weight", workers=workers), tmp_path)
    assert found
    assert all(sentence.startswith("after step ") for sentence in found)


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("epochs", "loss"),
    [
        pytest.param(*change, id=name, marks=[pytest.mark.slow] if number else [])
        for number, (name, change) in enumerate(CHANGES.items())
    ],
)
def test_late_check_detects_a_loss_that_changes_in_a_late_epoch(epochs: str, loss: str, tmp_path: Path) -> None:
    assert refusals(CHANGING.format(epochs=epochs, loss=loss), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_late_check_names_weights_that_follow_local_losses(tmp_path: Path) -> None:
    found = refusals(FOLLOWING.format(seen="errors.detach()"), tmp_path)
    assert found
    assert all("`weights`" in sentence for sentence in found)


@pytest.mark.slow
@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    "text", [RARE.format(weights="None", workers=2), FOLLOWING.format(seen="run.mean(errors.detach())")]
)
def test_late_check_accepts_programs_equal_to_one_process(text: str, tmp_path: Path) -> None:
    assert refusals(text, tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_late_check_names_a_target_table_read_from_epoch_three_on(tmp_path: Path) -> None:
    found = refusals(TABLE.format(learn="table[index] = output.detach()"), tmp_path)
    assert found
    assert all("`table`" in sentence for sentence in found)


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_late_check_accepts_a_target_table_gathered_from_all_nodes(tmp_path: Path) -> None:
    text = TABLE.format(learn="table[evener.gather(index)] = evener.gather(output).detach()")
    assert refusals(text, tmp_path) == []


SLEEPING = """
import os, time
loader = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)
rank = os.getpid()
for epoch in run.epochs(2):
    for x, y in loader:
        if epoch and os.getpid() != rank:
            time.sleep(100)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
results = model.state_dict()
"""


def rank_with_slow_replicas(env: RankEnvironment, text: str) -> None:
    """A rank that waits for its replicas for a second only."""
    vars(later_comparisons)["SECONDS"] = 1
    run = run_of(env, "3,1")
    perform(text, "program")
    finish(run, env)


@pytest.mark.slow
def test_unfinished_late_check_is_reported() -> None:
    nodes = [NodeSpec(name=f"node-{i}", threads=1) for i in range(2)]
    told: list[RunEvent] = []
    begin = time.monotonic()
    run_local(rank_with_slow_replicas, nodes, HEAD + SLEEPING, patience=10, on_event=told.append)
    assert time.monotonic() - begin < 60
    (note,) = [event for event in told if isinstance(event, Event) and event.kind == "unchecked"]
    assert "did not finish" in note.message


FAILING = """
import os
loader = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)
rank = os.getpid()
for epoch in run.epochs(3):
    for x, y in loader:
        if epoch and os.getpid() != rank:
            raise MemoryError("no memory")
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
results = model.state_dict()
"""


def unchecked(rank: Callable[[RankEnvironment, str], None], text: str) -> list[str]:
    """The reasons for which later steps of a program were not compared with one process."""
    nodes = [NodeSpec(name=f"node-{i}", threads=1) for i in range(2)]
    told: list[RunEvent] = []
    run_local(rank, nodes, HEAD + text, patience=10, on_event=told.append)
    return [event.message for event in told if isinstance(event, Event) and event.kind == "unchecked"]


def plain_rank(env: RankEnvironment, text: str) -> None:
    """A rank of a program."""
    run = run_of(env, "3,1")
    try:
        perform(text, "program")
    except BaseException as error:
        end_copy(run, error)
        raise
    finish(run, env)


def rank_that_cannot_fork(env: RankEnvironment, text: str) -> None:
    """A rank whose machine allows no more processes after the first comparison."""
    run = run_of(env, "3,1")
    first, forks = os.fork, list[int]()

    def fork() -> int:
        forks.append(1)
        if len(forks) > (2 if env.rank == 0 else 1):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return first()

    os.fork = fork
    perform(text, "program")
    finish(run, env)


def test_failed_late_check_is_reported_with_its_reason() -> None:
    (message,) = unchecked(plain_rank, FAILING)
    assert "MemoryError: no memory" in message


@pytest.mark.slow
def test_run_continues_where_late_replicas_cannot_be_forked() -> None:
    (message,) = unchecked(rank_that_cannot_fork, FAILING.replace("if epoch and", "if False and"))
    assert "Resource temporarily unavailable" in message


def alone() -> Group:
    """Return the group of one rank."""
    cpu = torch.device("cpu")
    return Group(rank=0, size=1, device=cpu, nodes=["n"], timer=StepTimer(cpu))


def test_abandoned_check_without_a_folder_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    later = LaterComparisons(alone(), may_differ=False, read=lambda _: Report())
    later._pending.append(_Begun([], None, 3, "the disk is full"))
    later.abandon()
    assert (tmp_path / "file").exists()


def test_abandoned_late_check_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as replica:
        (tmp_path / "folder").mkdir()
        later = LaterComparisons(alone(), may_differ=False, read=lambda _: Report())
        later._pending.append(_Begun([replica.pid], tmp_path / "folder", 3))
        later.abandon()
    assert replica.returncode == -signal.SIGKILL
    assert not (tmp_path / "folder").exists()
