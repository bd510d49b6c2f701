"""The server's whole state on disk, from which a restarted master continues: one file, written atomically.

It is a safetensors file: the weights under their own names, the optimizer's arrays under `evener.outer/...`, and all
else as JSON in the metadata; weights at the ends of epochs, whole, under `evener.end/...`. Open leases are not saved:
their samples are assigned again.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from evener.agreements.data_assigner import CursorState
from evener.agreements.layout import Flat, Floats, StateLayout, flat_of
from evener.agreements.messages import WorkerTotals
from evener.agreements.settings import AgreementSettings, Workload
from evener.records.atomic import atomic_draft
from evener.records.errors import InvalidFile, MissingFile, require
from evener.records.schema import Noun, parse_noun

_STATE, _OUTER, _END = "evener.server", "evener.outer/", "evener.end/"
_METADATA = "__metadata__"
"""Name that a safetensors file does not allow for an array."""


class ServerState(Noun, frozen=True, kw_only=True):
    """The part of a snapshot without arrays.

    Attributes:
        agreement: settings of the agreement.
        workload: workload of the run.
        layout: layout of the weights.
        num_updates: number of updates of the weights.
        last_number: number of the last lease.
        cursor: state of the remaining samples.
        unit_seconds: seconds per sample, by worker.
        fixed_samples: samples that cost as much as the fixed part of a step, by worker.
        totals: totals by worker.
    """

    agreement: AgreementSettings
    workload: Workload
    layout: StateLayout
    num_updates: int
    last_number: int
    cursor: CursorState
    unit_seconds: dict[str, float]
    totals: dict[str, WorkerTotals]
    fixed_samples: dict[str, float] = {}


@dataclass(frozen=True)
class Snapshot:
    """A server's state at one moment.

    Attributes:
        state: all but the arrays.
        weights: common weights.
        optimiser: arrays of the optimizer, and what compression has left out of gradients, by name.
        ends: weights at the ends of epochs that are not validated yet.
    """

    state: ServerState
    weights: Flat
    optimiser: Mapping[str, Floats]
    ends: Mapping[int, Flat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_free(self.state.layout)


def require_free(layout: StateLayout) -> None:
    """Raise InvalidValue if the name of an array is reserved in a snapshot."""
    for prefix in (_OUTER, _END):
        names = sorted(entry.name for entry in layout.entries if entry.name.startswith(prefix))
        require(not names, "names of the state", names, f"without the prefix {prefix}")
    require(all(entry.name != _METADATA for entry in layout.entries), "name of an array", _METADATA, "another one")


def save_snapshot(snapshot: Snapshot, path: Path) -> bytes:
    """Write `snapshot` to `path` so that a crash at any moment leaves the old file or the new one.

    Returns:
        SHA-256 of the file.

    Raises:
        OSError: the file cannot be written.
    """
    arrays = snapshot.weights.views() | {_OUTER + name: array for name, array in snapshot.optimiser.items()}
    arrays |= {f"{_END}{epoch}": weights.memory for epoch, weights in snapshot.ends.items()}
    metadata = {_STATE: msgspec.json.encode(snapshot.state).decode()}
    with atomic_draft(path, private=True) as draft:
        try:
            save_file(arrays, draft, metadata)
        except SafetensorError as error:  # from the disk: the contents were checked before
            raise _as_os_error(str(error)) from error
        return _digest(draft)


def _as_os_error(text: str) -> OSError:
    """Return the system error in a message of safetensors, such as "No space left on device (os error 28)"."""
    number = re.search(r"\(os error (\d+)\)", text)
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(text)


def load_snapshot(path: Path, digest: bytes | None = None) -> Snapshot:
    """Load the snapshot in the file `path`.

    Args:
        path: path of the file.
        digest: expected SHA-256, if it is known.

    Raises:
        MissingFile: the file does not exist.
        InvalidFile: it is not a server's snapshot, it has changed, or arrays are missing in it or do not fit.
    """
    if digest is not None and path.exists() and _digest(path) != digest:
        raise InvalidFile(f"{path} is damaged: its checksum is wrong")
    metadata, arrays = _read(path)
    if _STATE not in metadata:
        raise InvalidFile(f"{path} is not a snapshot of a server: its metadata has no {_STATE}")
    state = parse_noun(metadata[_STATE].encode(), ServerState, source=str(path))
    for entry in state.layout.entries:
        saved = arrays.get(entry.name)
        if saved is None or saved.shape != entry.shape or saved.dtype != entry.dtype:
            raise InvalidFile(f"{path}: there is no array {entry.name} of {entry.dtype} and shape {entry.shape}")
    optimiser = {name.removeprefix(_OUTER): array for name, array in arrays.items() if name.startswith(_OUTER)}
    return Snapshot(state, flat_of(state.layout, arrays), optimiser, _ends_of(state.layout, arrays, path))


def _ends_of(layout: StateLayout, arrays: Mapping[str, NDArray[Any]], path: Path) -> dict[int, Flat]:
    ends = {name.removeprefix(_END): array for name, array in arrays.items() if name.startswith(_END)}
    for epoch, array in ends.items():
        if not epoch.isdecimal() or array.dtype != np.uint8 or array.shape != (layout.num_bytes,):
            raise InvalidFile(f"{path}: the array {_END}{epoch} is not {layout.num_bytes} bytes of the end of an epoch")
    return {int(epoch): Flat(layout, array) for epoch, array in ends.items()}


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _read(path: Path) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    try:
        with safe_open(path, framework="numpy") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise MissingFile(f"there is no snapshot {path}") from error
    except (SafetensorError, OSError) as error:
        raise InvalidFile(f"{path} is not a safetensors file: {error}") from error
