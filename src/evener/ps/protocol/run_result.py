"""The result of a run: its exit code, record and weights, as sent and as saved."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from safetensors.numpy import save

from evener.agreements.layout import Flat
from evener.records.atomic import atomic_write
from evener.records.decoding import decode_json
from evener.records.error_kind import ErrorKind
from evener.records.errors import EvenerError, MissingFile
from evener.records.record import RECORD, WEIGHTS, TrainRecord
from evener.records.schema import NOT_DECODED

_END = "end.json"


class RunResult(NamedTuple):
    """The result of a run.

    Attributes:
        kind: kind of the error that ended it; None if it was completed.
        reason: the error's sentence.
        record: record as JSON; empty if no node ever worked for the run.
        weights: a safetensors file; empty if no node ever worked for the run.
    """

    kind: ErrorKind | None
    reason: str
    record: bytes
    weights: bytes | memoryview

    @property
    def error(self) -> EvenerError | None:
        """The error that ended the run; None if it was completed."""
        return None if self.kind is None else self.kind.as_error(self.reason)


def encode_record(record: TrainRecord) -> bytes:
    """Encode a record as JSON."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1)


def weights_of(weights: Flat) -> bytes:
    """Return a safetensors file of the weights, each by its name."""
    return save({name: np.ascontiguousarray(array) for name, array in weights.views().items()})


def save_result(folder: Path, result: RunResult) -> None:
    """Write the result of a run into its folder, for this user only. Raises OSError."""
    for name, data in (
        (WEIGHTS, result.weights),
        (RECORD, result.record),
        (_END, msgspec.json.encode((result.kind, result.reason))),
    ):
        atomic_write(folder / name, data, private=True)


def result_bytes(folder: Path) -> int:
    """Return the size of the result of the run in `folder`. Raises MissingFile: there is none."""
    try:
        return sum((folder / name).stat().st_size for name in (_END, RECORD, WEIGHTS))
    except OSError as error:
        raise MissingFile(f"there is no result in {folder}") from error


def load_result(folder: Path) -> RunResult:
    """Load the result of the run in `folder`.

    Raises:
        MissingFile: there was no such run, or it has not ended.
    """
    try:
        kind, reason = decode_json((folder / _END).read_bytes(), tuple[ErrorKind | None, str])
        return RunResult(kind, reason, (folder / RECORD).read_bytes(), (folder / WEIGHTS).read_bytes())
    except (OSError, *NOT_DECODED) as error:
        raise MissingFile(f"there is no result in {folder}") from error
