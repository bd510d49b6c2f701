"""What a program asks of all nodes while it computes a batch, one node of which has no samples of it."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from evener.comm.group import Group
from evener.comm.step_timing import StepTimer
from evener.frontends.programs.divided_loader import require_same_size
from evener.frontends.programs.options import ScriptConfig
from evener.frontends.programs.run import Run
from evener.frontends.programs.timing_probe import TimingProbe
from evener.frontends.programs.unprepared_tensors import UnpreparedWeights
from evener.launch.nodes import LocalNode
from evener.launch.rank_environment import RankEnvironment
from evener.records.errors import InvalidInput
from evener.records.profile import TaskTiming
from support.refusals import refused
from support.thread_ranks import together


def test_timing_probe_counts_work_after_share_as_the_forward_pass(tmp_path: Path) -> None:
    group = Group(rank=0, size=1, device=torch.device("cpu"), nodes=["a"], timer=StepTimer(torch.device("cpu")))
    env = RankEnvironment(0, [LocalNode(name="a")], group.device, 10, lambda _: None)
    run = Run(env, group, ScriptConfig(script=Path("program.py")))
    run.equivalence_check.replica = copy = TimingProbe(group, tmp_path / "alone.json", seconds=math.inf)
    for _ in range(7):
        part = run.share(torch.ones(24, 50))
        assert (part @ part.t()).sum() > 0
    copy.write(copy.path)
    batches = msgspec.json.decode(copy.path.read_bytes(), type=TaskTiming).batches
    assert [batch.samples for batch in batches] == [12, 24]
    assert all(batch.forward_seconds > 0 for batch in batches)


VALUES = torch.arange(18.0, dtype=torch.float64)


def run_on(group: Group, shares: str) -> Run:
    """Return the run of a rank, without a comparison."""
    env = RankEnvironment(
        rank=group.rank,
        nodes=[LocalNode(name=name) for name in group.nodes],
        device=group.device,
        patience=10,
        notify=lambda _: None,
    )
    run = Run(env, group, ScriptConfig(script=Path("program.py"), shares=shares))
    run.equivalence_check.is_wanted = False
    return run


def sum_amid(group: Group, shares: str, sums: list[float]) -> list[float]:
    """Append the sums of a program that evaluates amid a training batch: before, in the evaluation and after it."""
    run = run_on(group, shares)
    tests = run.prepare(DataLoader(TensorDataset(VALUES), batch_size=9))
    x = run.share(VALUES[:8])
    sums += [run.sum(len(x)), float(run.sum(x.sum())), float(run.mean(x.mean()))]
    with torch.no_grad():
        total = sum(float(rows.sum()) for (rows,) in tests)
        sums.append(run.sum(total))
        with pytest.raises(InvalidInput):
            run.mean(total)
    sums += [run.sum(len(x)), float(run.sum(x.sum())), float(run.mean(x.mean()))]
    return sums


def test_sums_after_nested_evaluation_equal_one_process() -> None:
    x = VALUES[:8]
    of_batch = [float(len(x)), float(x.sum()), float(x.mean())]
    for sums in together(2, lambda group: sum_amid(group, "3,1", [])):
        assert sums == pytest.approx([*of_batch, float(VALUES.sum()), *of_batch], rel=1e-12)


def test_sum_after_nested_evaluation_needs_samples_on_every_node() -> None:
    def work(group: Group) -> list[float]:
        sums: list[float] = []
        with pytest.raises(InvalidInput):
            sum_amid(group, "3,1,0", sums)
        return sums

    x = VALUES[:8]
    for sums in together(3, work):
        assert sums == pytest.approx([8.0, float(x.sum()), float(x.mean()), float(VALUES.sum())], rel=1e-12)


def test_samples_excluded_by_the_count_still_count_in_a_sum() -> None:
    def work(group: Group) -> int:
        run = run_on(group, "1,1")
        x = run.share(VALUES[:8], count=lambda x: (x < 4).sum())  # the second node has none of these
        return int(run.sum(len(x)))

    assert together(2, work) == [8] * 2


def test_nan_from_a_node_without_samples_is_ignored() -> None:
    def work(group: Group) -> tuple[float, float, int]:
        env = RankEnvironment(
            rank=group.rank,
            nodes=[LocalNode(name=name) for name in group.nodes],
            device=group.device,
            patience=10,
            notify=lambda _: None,
        )
        run = Run(env, group, ScriptConfig(script=Path("program.py"), shares="1,0"))
        run.equivalence_check.is_wanted = False
        run.share(torch.ones(4, 2))
        value = 3.0 if group.rank == 0 else math.nan
        return run.mean(value), run.sum(value), int(run.sum(torch.tensor([2 + group.rank])))

    assert together(2, work) == [(3.0, 3.0, 2)] * 2


@pytest.mark.parametrize("targets", [(3.0, 3.0), (3.0, 4.0)])
def test_unprepared_optimizer_weights_are_compared(targets: tuple[float, float]) -> None:
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in targets]
    optimizers = [torch.optim.SGD([weight], lr=0.5) for weight in weights]
    sentences: list[str] = []

    def rank(group: Group) -> None:
        others = UnpreparedWeights(lambda: [optimizers[1 - group.rank]])  # all threads see all steps
        others.begin()
        torch.autograd.backward((weights[group.rank] - targets[group.rank]).square().sum())
        optimizers[group.rank].step()
        sentences.append(others.end(group))

    together(2, rank)
    assert [bool(sentence) for sentence in sentences] == [targets[0] != targets[1]] * 2


def test_unequal_dataset_sizes_on_nodes_are_refused() -> None:
    def rank(group: Group) -> None:
        with refused(InvalidInput):
            require_same_size(group, DataLoader(TensorDataset(VALUES[: 9 + group.rank]), batch_size=9))

    together(2, rank)
