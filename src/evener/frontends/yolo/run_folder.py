"""The folder of a run: which rank writes there, and what happens to it when that rank is lost.

One rank of every machine writes its checkpoints and results there, the others into folders that are gone afterwards;
where machines share a disk, the first one's rank alone. When the leader is gone, the next one goes on in its folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from evener.comm.group import Group
from evener.records.atomic import atomic_write
from evener.training.checkpoint import apart


@contextlib.contextmanager
def own_folder(group: Group, folder: Path, *, is_first_here: bool, is_late: bool) -> Iterator[Path]:
    """Where this rank writes: the folder of the run, or one that is gone afterwards; all ranks call this.

    Args:
        group: the ranks.
        folder: of the run.
        is_first_here: whether no other rank of this machine writes there.
        is_late: whether the run has begun without this rank, which is alone as yet.
    """
    if not is_late:
        is_shared = _sees_leaders(group, folder)
        if group.is_leader or (is_first_here and not is_shared):
            yield folder
            return
    own_folder = (
        folder / f".rank.{os.getpid()}.{secrets.randbelow(2**32)}"
    )  # `remove_drafts` knows it, if this rank is killed
    own_folder.mkdir(parents=True)
    try:
        yield own_folder
    finally:
        shutil.rmtree(own_folder, ignore_errors=True)


def _sees_leaders(group: Group, folder: Path) -> bool:
    """Whether what the leader writes into `folder` is there on this rank's machine, too."""
    mark = folder / f".{secrets.token_hex(8)}"
    if group.is_leader:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    name = group.broadcast(mark.name.encode()).decode()
    is_there = (folder / name).exists()
    group.barrier()
    if group.is_leader:
        mark.unlink()
    return is_there


def take_folder(trainer: Any, folder: Path) -> None:
    """Have `trainer` write into `folder` from now on, whose writer is gone; what it could not write is added."""
    before, trainer.save_dir, trainer.wdir = trainer.save_dir, folder, folder / "weights"
    for name in ("last", "best"):
        written, path = getattr(trainer, name), trainer.wdir / f"{name}.pt"
        if written.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, written.read_bytes())
        setattr(trainer, name, path)
    trainer.csv, trainer.args.save_dir, trainer.validator.save_dir = folder / "results.csv", str(folder), folder
    _add_results(before / "results.csv", trainer.csv)


def _add_results(source: Path, target: Path) -> None:
    """Add the lines of `source` to `target` that it lacks, by their first column. Ultralytics heads a file itself."""
    lines = source.read_text(encoding="utf-8").splitlines() if source.exists() else []
    known = [line.split(",")[0] for line in target.read_text(encoding="utf-8").splitlines()] if target.exists() else []
    if new := [line for line in lines if line.split(",")[0] not in known]:
        with target.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in new)


def share_best(trainer: Any) -> None:
    """Let all ranks have `best.pt`, of which those that came later may have none yet; all ranks call this."""
    group: Group = trainer.trainer_rank.group
    rows = group.all_gather_bytes(b"+" if trainer.best.exists() else b"")
    if all(rows) or not any(rows):
        return
    giver = next(rank for rank, row in enumerate(rows) if row)
    weights = save(apart(read_weights(trainer.best))) if group.rank == giver else b""
    weights = group.broadcast_from(giver, weights)
    if not trainer.best.exists():
        best = deepcopy(trainer.ema.ema)
        best.load_state_dict(load(weights))
        write_checkpoint(best.half(), vars(trainer.args), trainer.best)


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint of Ultralytics that this rank wrote itself: it is a pickle."""
    weights = torch.load(checkpoint, map_location="cpu", weights_only=False)
    return dict((weights["ema"] or weights["model"]).state_dict())


def write_checkpoint(model: nn.Module, train_args: Mapping[str, Any], path: Path) -> None:
    """Write `model` as Ultralytics leaves it at the end of a training."""
    content = {"epoch": -1, "ema": None, "model": model, "train_args": dict(train_args)}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
