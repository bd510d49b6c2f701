"""What a program asks of all nodes while it computes a batch, one node of which has no samples of it."""

from __future__ import annotations

import math
from collections.abc import Callable
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
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.records.errors import InvalidInput
from evener.records.profile import TaskTiming
from evener.records.record import Event
from support.program_runs import run_on
from support.refusals import refused
from support.thread_ranks import together


def test_timing_probe_counts_work_after_share_as_the_forward_pass(tmp_path: Path) -> None:
    group = Group(rank=0, size=1, device=torch.device("cpu"), nodes=["a"], timer=StepTimer(torch.device("cpu")))
    env = RankEnvironment(0, [NodeSpec(name="a")], group.device, 10, lambda _: None)
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
            nodes=[NodeSpec(name=name) for name in group.nodes],
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


def parts_of_a_program() -> tuple[torch.nn.Linear, torch.optim.Optimizer, DataLoader[tuple[torch.Tensor, ...]]]:
    """Return a model, its optimizer, and a loader of one batch."""
    model = torch.nn.Linear(1, 1, dtype=torch.float64)
    data = TensorDataset(torch.arange(4.0, dtype=torch.float64)[:, None])
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4)


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Train on a batch."""
    optimizer.zero_grad()
    torch.autograd.backward(model(x).mean())
    optimizer.step()


def without_prepare(run: Run) -> None:
    for _ in run.epochs(1):
        pass


def without_prepare_and_epochs(run: Run) -> None:
    run.finish()


def without_loader(run: Run) -> None:
    model, optimizer, loader = parts_of_a_program()
    run.prepare(model, optimizer)
    for (x,) in loader:
        one_step(model, optimizer, x)


def without_result(run: Run) -> None:
    model, optimizer, loader = parts_of_a_program()
    run.prepare(model, optimizer, loader)
    for (x,) in loader:
        one_step(model, optimizer, x)


def mean_without_result(run: Run) -> None:
    model, optimizer, loader = parts_of_a_program()
    run.prepare(model, optimizer, loader)
    for (x,) in loader:
        run.mean(model(x).mean())


@pytest.mark.parametrize("program", [without_prepare, without_prepare_and_epochs, mean_without_result])
def test_program_whose_nodes_would_work_each_for_itself_is_refused(program: Callable[[Run], None]) -> None:
    def rank(group: Group) -> None:
        with refused(InvalidInput):
            program(run_on(group, "1,1"))

    together(2, rank)


@pytest.mark.parametrize("program", [without_loader, without_result])
def test_program_that_divides_no_batch_says_so_once(program: Callable[[Run], None]) -> None:
    """It may be exact: all nodes may compute the same whole batches."""

    def rank(group: Group) -> list[str]:
        told: list[object] = []
        run = run_on(group, "1,1", told.append)
        program(run)
        program(run)
        return [event.kind for event in told if isinstance(event, Event)]

    assert together(2, rank) == [["undivided"], []]


@pytest.mark.parametrize("program", [without_prepare, without_loader, without_result, mean_without_result])
def test_program_on_one_node_may_prepare_what_it_likes(program: Callable[[Run], None]) -> None:
    together(1, lambda group: program(run_on(group, "1")))


def test_program_without_a_loader_shares_its_batches() -> None:
    def rank(group: Group) -> torch.Tensor:
        run = run_on(group, "3,1")
        model, optimizer, _ = parts_of_a_program()
        torch.nn.init.ones_(model.weight)
        run.prepare(model, optimizer)
        for _ in run.epochs(1):
            one_step(model, optimizer, run.share(torch.arange(4.0, dtype=torch.float64)[:, None]))
        return next(model.parameters()).detach()

    weights = together(2, rank)
    assert [float(weight) for weight in weights] == pytest.approx([1 - 0.1 * 1.5] * 2, abs=1e-15)


def test_program_may_add_up_over_nodes_without_preparing_anything() -> None:
    def rank(group: Group) -> float:
        run = run_on(group, "1,1")
        total = float(run.sum(torch.tensor(float(run.rank + 1))))
        run.finish()
        return total

    assert together(2, rank) == [3.0, 3.0]
