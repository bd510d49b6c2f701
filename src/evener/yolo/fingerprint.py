"""Whether all ranks begin with the same weights, data and versions: files of one name may differ between machines."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from evener.comm.group import Group


def differing(group: Group, trainer: Any, model: nn.Module) -> str:
    """What a rank has otherwise than the leader, in a sentence; empty if all have the same. All ranks call this."""
    installed = version("ultralytics")
    own = {
        f"Ultralytics {installed}": installed,
        f"{len(trainer.train_loader.dataset)} images to train with": _names(trainer.train_loader.dataset),
        f"{len(trainer.test_loader.dataset)} images to validate with": _names(trainer.test_loader.dataset),
        f"the weights {trainer.args.model}": _weights(model),
    }
    rows = [msgspec.json.decode(row, type=dict[str, str]) for row in group.all_gather_bytes(msgspec.json.encode(own))]
    for node, row in zip(group.nodes, rows, strict=True):
        for (mine, value), (theirs, other) in zip(rows[0].items(), row.items(), strict=True):
            if value != other:
                return (
                    f"node {node} has {theirs}, node {group.nodes[0]} has {mine}, and they differ: "
                    "give all nodes the same files and versions"
                )
    return ""


def _names(dataset: Any) -> str:
    """Of the images, in order, and of how many objects are on each."""
    files = getattr(dataset, "im_files", None) or [sample[0] for sample in dataset.samples]
    counts = [len(label["cls"]) for label in getattr(dataset, "labels", [])]
    return _digest(repr(([Path(file).name for file in files], counts)).encode())


def _weights(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
