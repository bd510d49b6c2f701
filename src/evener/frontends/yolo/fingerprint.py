"""Whether all ranks begin with the same weights, data and versions: files of one name may differ between machines."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from evener.comm.group import Group
from evener.comm.signed_store import SignedStore
from evener.records.decoding import decode_json
from evener.records.errors import NotNeeded

_LEFT = "yolo/data"


def differing(group: Group, trainer: Any, model: nn.Module) -> str:
    """Describe the first difference between a rank and the leader; empty if there is none. All ranks call this."""
    local = {**_data(trainer), f"the weights {trainer.args.model}": _weights(model)}
    rows = [decode_json(row, dict[str, str]) for row in group.all_gather_bytes(msgspec.json.encode(local))]
    differences = (_difference(node, row, group.nodes[0], rows[0]) for node, row in zip(group.nodes, rows, strict=True))
    return next(filter(None, differences), "")


def leave_data(store: SignedStore, node: str, trainer: Any) -> None:
    """Publish the fingerprint of the data of `node` for ranks that join later."""
    store.set(_LEFT, msgspec.json.encode((node, _data(trainer))).decode())


def require_same_data(store: SignedStore, node: str, trainer: Any) -> None:
    """Raise NotNeeded if `node`, which joins a run under way, has other data or another version of Ultralytics."""
    first, theirs = store.get_as(_LEFT, tuple[str, dict[str, str]])
    if sentence := _difference(node, _data(trainer), first, theirs):
        raise NotNeeded(sentence)


def _data(trainer: Any) -> dict[str, str]:
    """Return fingerprints of the data and the version of Ultralytics, by their description for the user."""
    installed = version("ultralytics")
    return {
        f"Ultralytics {installed}": installed,
        f"{len(trainer.train_loader.dataset)} images to train with": _names(trainer.train_loader.dataset),
        f"{len(trainer.test_loader.dataset)} images to validate with": _names(trainer.test_loader.dataset),
    }


def _difference(node: str, local: Mapping[str, str], first: str, theirs: Mapping[str, str]) -> str:
    """Describe the first difference between two nodes; empty if there is none."""
    for (label, value), (their_label, other) in zip(local.items(), theirs.items(), strict=True):
        if value != other:
            return (
                f"node {node} has {label}, node {first} has {their_label}, and they differ: "
                "give all nodes the same files and versions"
            )
    return ""


def _names(dataset: Any) -> str:
    """Hash the images' names, in order, and the number of objects on each."""
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
