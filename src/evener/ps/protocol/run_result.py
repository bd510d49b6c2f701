"""How a run ended: its exit code, its record and its weights, as they travel and lie on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from safetensors.numpy import save

from evener.records.atomic import atomic_write
from evener.records.error_kind import ErrorKind
from evener.records.errors import EvenerError, MissingFile
from evener.records.record import TrainRecord
from evener.records.schema import NOT_DECODED
from evener.sync.layout import Flat

_WEIGHTS, _RECORD, _END = "model.safetensors", "record.json", "end.json"


class RunResult(NamedTuple):
    """How a run ended.

    Attributes:
        kind: of the error that ended it; None if it was completed.
        reason: the error's sentence.
        record: as JSON; empty if nobody ever worked for it.
        weights: a safetensors file; likewise.
    """

    kind: ErrorKind | None
    reason: str
    record: bytes
    weights: bytes

    @property
    def error(self) -> EvenerError | None:
        """Why it ended before it was completed; None if it was."""
        return None if self.kind is None else self.kind.as_error(self.reason)


def encode_record(record: TrainRecord) -> bytes:
    """As it travels and lies on the disk."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1)


def weights_of(weights: Flat) -> bytes:
    """A safetensors file of the weights, each by its name."""
    return save({name: np.ascontiguousarray(array) for name, array in weights.views().items()})


def save_result(folder: Path, result: RunResult) -> None:
    """Write what remains of a run into its folder, for this user only. Raises OSError."""
    for name, data in (
        (_WEIGHTS, result.weights),
        (_RECORD, result.record),
        (_END, msgspec.json.encode((result.kind, result.reason))),
    ):
        atomic_write(folder / name, data, private=True)


def load_result(folder: Path) -> RunResult:
    """What remains of the run in `folder`.

    Raises:
        MissingFile: there was no such run, or it has not ended.
    """
    try:
        kind, reason = msgspec.json.decode((folder / _END).read_bytes(), type=tuple[ErrorKind | None, str])
        return RunResult(kind, reason, (folder / _RECORD).read_bytes(), (folder / _WEIGHTS).read_bytes())
    except (OSError, *NOT_DECODED) as error:
        raise MissingFile(f"no result lies in {folder}") from error
