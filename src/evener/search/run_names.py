"""Names of a study's runs at a master, kept in a file so that a restarted search finds its runs."""

from __future__ import annotations

import secrets
from pathlib import Path

from evener.records.atomic import atomic_write
from evener.records.schema import Noun, RunName, encode_noun, read_noun

_FILE = "runs.json"


class StudyRuns(Noun, frozen=True, kw_only=True):
    """The content of `runs.json`.

    Attributes:
        prefix: prefix of the names of all runs.
        names: name of the last run of each trial, by its number, as text.
    """

    prefix: RunName
    names: dict[str, RunName] = {}


class RunNames:
    """The names of a study's runs at a master.

    Args:
        folder: folder of the study.

    Raises:
        InvalidInput: the file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        stored = read_noun(self._path, StudyRuns) if self._path.exists() else None
        self._prefix = stored.prefix if stored else f"tune-{secrets.token_hex(4)}"
        self._names = {int(number): name for number, name in stored.names.items()} if stored else {}
        if stored is None:
            self._save()

    def is_own(self, name: str) -> bool:
        """Return whether a run belongs to this study."""
        return name.startswith(f"{self._prefix}-")

    def proposed(self, number: int) -> str:
        """Return the name with which a trial's run is submitted; the master changes it if it is taken."""
        return f"{self._prefix}-{number:04d}"

    def of(self, number: int) -> str | None:
        """Return the name of a trial's run; None if it has none."""
        return self._names.get(number)

    def number_of(self, name: str) -> int | None:
        """Return the number of the trial of a run; None if the run is not recorded."""
        return next((number for number, known in self._names.items() if known == name), None)

    def record(self, number: int, name: str) -> None:
        """Record the name of a trial's run. Raises OSError."""
        if self._names.get(number) != name:
            self._names[number] = name
            self._save()

    def _save(self) -> None:
        names = {str(number): name for number, name in self._names.items()}
        atomic_write(self._path, encode_noun(StudyRuns(prefix=self._prefix, names=names)))
