"""What trainers ask of all ranks; the trainers themselves are held against one process in tests/programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from evener.comm.joining import leave_group
from evener.frontends.integrations.reductions import Reductions
from evener.frontends.programs.options import ScriptConfig
from evener.frontends.programs.run import Run
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.records.errors import InvalidInput
from evener.training.context import join_world


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)


def rank(env: RankEnvironment, folder: str) -> None:
    """Everything on two ranks; the leader writes what came."""
    run = Run(env, join_world(env), ScriptConfig(script=Path("x"), shares="3,1"))
    every = Reductions(run, "samples")
    loader: Any = every.loader(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=8))
    run.equivalence_check.is_wanted = False
    found: dict[str, Any] = {"again": every.loader(loader) is loader}
    for [x] in loader:
        with every.inside():
            found["mean"], found["sum"] = every.reduced(x.mean(), "mean"), every.reduced(x.sum(), "ReduceOp.SUM")
    found["outside"] = every.reduced(torch.tensor(float(run.rank)), "mean")
    found["decided"] = [every.decided(run.rank == 0, True), every.decided(run.rank == 0, False)]
    found["told"] = every.broadcast({"path": Path("a") / str(run.rank)})
    with pytest.raises(InvalidInput, match=r"call evener\.gather in the place of all_gather"):
        every.rows(torch.ones(1))
    with pytest.raises(InvalidInput, match="give the class of the data a __len__"):
        every.loader(DataLoader(Stream(), batch_size=2))
    if run.leader:
        torch.save(found, Path(folder) / "found.pt")
    run.group.barrier()
    leave_group()


def test_ranks_agree_on_means_sums_decisions_and_objects(tmp_path: Path) -> None:
    nodes = [NodeSpec(name=f"node-{i}", threads=1) for i in range(2)]
    run_local(rank, nodes, str(tmp_path), patience=30, on_event=print)
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    assert (float(found["mean"]), float(found["sum"])) == (3.5, 28.0)
    assert float(found["outside"]) == 0.5
    assert found["decided"] == [False, True]
    assert found["told"] == {"path": Path("a/0")}
    assert found["again"]
