"""A node that makes steps longer is left out once that is known, however ranks were started, or the reason is given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import NodeCost
from evener.oracle.rebalance import Balance
from evener.records.plan import Assignment, Plan, Prediction
from evener.records.record import Event, TrainRecord
from evener.records.schema import read_noun
from evener.training.monitor import Monitor
from evener.training.planning import why_all_take_part
from evener.training.step import StepReport
from support.commands import evener_here

CPU = torch.device("cpu")
TASKS = Path(__file__).parents[1] / "support_tasks"
SLOW, BUSY = str(TASKS / "slow_together.py"), str(TASKS / "busy_at_first.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "evener")
pytestmark = pytest.mark.timeout(120)


def plan_and_record(folder: Path, *words: str, task: str = SLOW) -> tuple[Plan, TrainRecord]:
    """Of a run that `words` begin in `folder`."""
    words = (*words, task, "--output", "run")
    if words[0] == "train":
        result = evener_here(*words, cwd=folder)
    else:
        result = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stderr + result.stdout
    return read_noun(folder / "run" / "plan.json", Plan), read_noun(folder / "run" / "record.json", TrainRecord)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("train", "--local-nodes", "1,1"), (*TORCHRUN, "train")], ids=["local nodes", "torchrun"]
)
def test_node_with_slow_profiled_steps_is_left_out_with_predictions(words: tuple[str, ...], tmp_path: Path) -> None:
    plan, record = plan_and_record(tmp_path, *words)
    assert plan.prediction is not None
    [left] = plan.assignments
    [out] = plan.rejected
    assert out.what != left.node
    assert out.what.endswith("1")
    assert out.step_seconds is not None
    assert plan.prediction.step_seconds < 0.9 * out.step_seconds
    assert [node.name for node in record.nodes] == [left.node]
    assert ("left out", out.what) in [(event.kind, event.message.partition(":")[0]) for event in record.events]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [("train", "--local-nodes", "1,1"), pytest.param((*TORCHRUN, "train"), marks=pytest.mark.slow)],
    ids=["local nodes", "torchrun"],
)
def test_busy_timings_do_not_predict_more_than_the_sum_of_speeds(words: tuple[str, ...], tmp_path: Path) -> None:
    plan, _ = plan_and_record(tmp_path, *words, task=BUSY)
    assert plan.prediction is not None
    assert plan.prediction.alone_seconds is not None
    alone = [one.fixed_seconds + plan.batch_size * one.sample_seconds for one in plan.assignments]
    speeds = sum(min(alone) / seconds for seconds in alone)
    assert 1 < plan.prediction.alone_seconds / plan.prediction.step_seconds <= speeds * (1 + 1e-9)


@pytest.mark.slow
def test_node_with_a_user_share_stays_and_the_plan_gives_the_reason(tmp_path: Path) -> None:
    plan, record = plan_and_record(
        tmp_path, "train", "--local-nodes", "1,1", "--shares", "26,24", "--option", "slow=0.5"
    )
    assert len(record.nodes) == 2
    assert plan.prediction is not None
    assert plan.prediction.alone_seconds is not None
    assert plan.prediction.alone_seconds < plan.prediction.step_seconds
    assert "--shares" in plan.advice


def test_plan_slower_than_one_device_names_the_first_valid_reason() -> None:
    nodes = (
        Assignment(rank=0, node="a", device="cpu", samples=1),
        Assignment(rank=1, node="b", device="cpu", samples=1),
    )
    slow = Prediction(step_seconds=6, compute_seconds=1, communication_seconds=5, sent_bytes=0, alone_seconds=3)
    plan = Plan(strategy="data", batch_size=2, assignments=nodes, prediction=slow)
    assert "torchrun" in why_all_take_part(plan, {"of the user": False, "of torchrun": True, "of more": True}).advice
    assert why_all_take_part(plan, {"of the user": False}).advice
    fast = replace(plan, prediction=replace(slow, step_seconds=2))
    assert why_all_take_part(fast, {"of the user": True}).advice == ""


PROGRAM = """
import os, time
import evener
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

run = evener.join()
torch.manual_seed(0)
model = nn.Linear(4, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(480, 4).double(), torch.randn(480, 1).double())
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    time.sleep(0.001 * len(x) if run.rank == 0 else 0.05)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("-m", "evener", "run", "program.py", "--local-nodes", "1,1", "--run-folder", "run"),
        (*TORCHRUN[1:-2], "-m", "evener", "run", "program.py", "--run-folder", "run"),
        (*TORCHRUN[1:-2], "program.py"),
    ],
    ids=["local nodes", "torchrun", "torchrun without a command"],
)
def test_program_reports_a_slow_node_once(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert result.returncode == 0, result.stderr
    [path] = tmp_path.rglob("record.json")
    record = read_noun(path, TrainRecord)
    [slow] = [event for event in record.events if event.kind == "slows the run down"]
    assert [name[-1] for name in slow.nodes] == ["1"]
    assert slow.message[:20] in result.stderr
    assert record.nodes[0].share > 0.6
    assert (
        record.nodes[0].waiting > 0.5
    )  # where ranks meet before they sum gradients, a rank waits and does not compute


@pytest.mark.parametrize(("wall", "told"), [(0.9, [("bob",)]), (0.3, [])])
def test_slow_nodes_are_named_if_steps_are_much_longer(wall: float, told: list[tuple[str, ...]]) -> None:
    workers = (NodeCost(unit_seconds=0.01), NodeCost(unit_seconds=0.01, fixed_seconds=0.01 if wall < 0.5 else 0.6))
    shown: list[Event] = []
    env = RankEnvironment(0, [NodeSpec(name="ada"), NodeSpec(name="bob")], CPU, 1.0, shown.append)
    group = Group(rank=0, size=1, device=CPU, nodes=["ada", "bob"], timer=StepTimer(CPU))
    balance = Balance(costs=workers, shares=(25, 25))
    monitor = Monitor(env, group, division=None, balance=balance)
    for step in range(60):
        assert monitor.balance is not None
        monitor.balance = monitor.balance.observe((25, 25), [worker.seconds(25) for worker in workers])
        monitor._name_slow_nodes([report(step, wall), report(step, wall)])
    assert [event.nodes for event in shown] == told


def report(step: int, wall: float) -> StepReport:
    return StepReport(
        step=step, samples=25, total=50, epoch=0, loss=0.0, wall=wall, timed_samples=25, io=0.0, fb=wall, wu=0.0,
        sent=0, stop=0, save=0, leave=0, has_loss=1, rate=0.1, weight=0.0,
    )  # fmt: skip
