"""A sampler that learns from the losses of a program: of all nodes, or it is refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, TensorDataset, WeightedRandomSampler

from evener.comm.group import Group
from evener.frontends.programs.sampler_changes import SamplerChanges
from evener.records.errors import InvalidInput
from support.commands import evener_here
from support.thread_ranks import together

PROGRAM = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset
import evener

class Hard(Sampler):
    def __init__(self, count):
        self.losses, self.generator = torch.full((count,), float("inf")), torch.Generator().manual_seed(1)

    def __len__(self):
        return len(self.losses)

    def __iter__(self):
        weights = torch.nan_to_num(self.losses, posinf=10.0)
        yield from torch.multinomial(weights, len(self), replacement=True, generator=self.generator).tolist()

run = evener.join()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
data = TensorDataset(torch.arange(40), torch.randn(40, 6).double(), torch.arange(40) % 3)
hard = Hard(40)
loader = DataLoader(data, batch_size=10, sampler=hard)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for epoch in run.epochs(3):
    for index, x, y in loader:
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        losses.mean().backward()
        optimizer.step()
        {learn}
if run.leader:
    torch.save(run.state(model), {path!r})
"""
OWN = "hard.losses[index] = losses.detach().float()"
OF_ALL = "hard.losses[evener.gather(index)] = evener.gather(losses).detach().float()"
AT_THE_LEADER = """index, losses = evener.gather(index), evener.gather(losses)
        if run.leader: hard.losses[index] = losses.detach().float()"""


def weights(folder: Path, learn: str, shares: str) -> dict[str, torch.Tensor]:
    path = folder / f"{shares}.pt"
    (folder / "program.py").write_text(PROGRAM.format(learn=learn, path=str(path)))
    nodes = ",".join("1" for _ in shares.split(","))
    ended = evener_here("run", "--local-nodes", nodes, "--shares", shares, "program.py", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    loaded: dict[str, torch.Tensor] = torch.load(path)
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("learn", [OF_ALL, AT_THE_LEADER])
def test_sampler_fed_with_losses_of_all_nodes_equals_one_process(tmp_path: Path, learn: str) -> None:
    alone, divided = weights(tmp_path, learn, "1"), weights(tmp_path, learn, "3,1")
    for name, value in alone.items():
        torch.testing.assert_close(divided[name], value, rtol=0.0, atol=1e-10)


def test_sampler_fed_with_local_losses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(learn=OWN, path=""))
    ended = evener_here("run", "--local-nodes", "1,1", "--shares", "3,1", "program.py", cwd=tmp_path)
    assert ended.returncode == InvalidInput.exit_code, ended.stderr
    assert "sampler.losses" in ended.stderr


STATE = """
import torch

losses = torch.ones(40)

def weights():
    return losses
"""
OUTSIDE = {
    "global": (
        "LOSSES = torch.ones(40)",
        "multinomial(LOSSES.float()",
        "LOSSES[index] = losses.detach().float()",
        "LOSSES",
    ),
    "data set": (
        "data.seen = torch.ones(40)",
        "multinomial(self.data.seen",
        "data.seen[index] = losses.detach().float()",
        "data.seen",
    ),
    "module": (
        "import state as kept",
        "multinomial(kept.losses",
        "kept.losses[index] = losses.detach().float()",
        "kept.losses",
    ),
    "module imported by a method": (
        "import state as kept",
        "multinomial(state.losses",
        "kept.losses[index] = losses.detach().float()",
        "state.losses",
    ),
    "function of a module": (
        "import state as kept",
        "multinomial(kept.weights()",
        "kept.losses[index] = losses.detach().float()",
        "losses",
    ),
    "getattr": (
        "data.seen = torch.ones(40)",
        "multinomial(getattr(self.data, 'seen')",
        "data.seen[index] = losses.detach().float()",
        "data.seen",
    ),
}


@pytest.mark.parametrize("place", OUTSIDE)
def test_sampler_reading_local_losses_elsewhere_is_refused(tmp_path: Path, place: str) -> None:
    made, read, learn, name = OUTSIDE[place]
    program = PROGRAM.format(learn=learn, path="").replace("multinomial(weights", read)
    program = program.replace("hard = Hard(40)", f"{made}\nhard = Hard(40)\nhard.data = data")
    program = program.replace("weights = ", "import state; weights = ")
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "state.py").write_text(STATE)
    ended = evener_here("run", "--local-nodes", "1,1", "--shares", "3,1", "program.py", cwd=tmp_path)
    assert ended.returncode == InvalidInput.exit_code, ended.stderr
    assert f"`{name}`" in ended.stderr or f".{name}`" in ended.stderr


@pytest.mark.parametrize("kept", [deque([1.0, 2.0]), np.float32(1.0), np.arange(3)])
def test_attributes_of_every_plain_type_are_compared(kept: Any) -> None:
    def change(rank: int, sampler: Any) -> None:
        sampler.kept = kept if rank == 0 else type(kept)([5.0, 7.0]) if isinstance(kept, deque) else kept + 1

    assert all("kept" in error for error in changed_attributes(change))


def test_dataset_cache_unread_by_the_sampler_is_not_compared() -> None:
    class Cached(TensorDataset):
        def __init__(self) -> None:
            super().__init__(torch.arange(8))
            self.cache, self.weights = {1: 1.0}, torch.ones(8)

    class Reading(RandomSampler):
        def __iter__(self) -> Iterator[int]:
            yield from torch.multinomial(self.data_source.weights, 8).tolist()  # type: ignore[attr-defined]

    data = Cached()
    names = SamplerChanges(BatchSampler(Reading(data), 2, drop_last=False), data)._prints()
    assert "sampler.data_source.weights" in names
    assert not any("cache" in name for name in names)


def changed_attributes(change: Callable[[int, WeightedRandomSampler], None]) -> list[str]:
    """Change the sampler of each of two ranks; return both ranks' errors, "" for none."""
    data = TensorDataset(torch.arange(8))

    def work(group: Group) -> str:
        sampler = WeightedRandomSampler(torch.full((8,), float("nan")).double().tolist(), 8)
        state = SamplerChanges(BatchSampler(sampler, 2, drop_last=False), data)
        change(group.rank, sampler)
        try:
            state.require_same_changes(group)
        except InvalidInput as error:
            return str(error)
        return ""

    return together(2, work)


def test_different_weight_changes_between_nodes_are_detected() -> None:
    def change(rank: int, sampler: WeightedRandomSampler) -> None:
        sampler.weights[rank] = 1.0

    assert all("weights" in error for error in changed_attributes(change))


def test_change_on_the_first_node_only_is_accepted() -> None:
    def change(rank: int, sampler: WeightedRandomSampler) -> None:
        if rank == 0:
            sampler.weights[3] = 1.0

    assert changed_attributes(change) == ["", ""]


def test_equal_changes_are_accepted() -> None:
    def change(_rank: int, sampler: WeightedRandomSampler) -> None:
        sampler.weights[5] = 0.5

    assert changed_attributes(change) == ["", ""]


def test_dataset_of_a_sampler_is_not_compared() -> None:
    data = TensorDataset(torch.arange(8))
    state = SamplerChanges(BatchSampler(RandomSampler(data), 2, drop_last=False), data)
    assert not any("data_source" in name for name in state._prints())
