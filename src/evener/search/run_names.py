"""What a study's runs are called at a master: written down, so that a search that was killed finds them again."""

from __future__ import annotations

import secrets
from pathlib import Path

from evener.records.atomic import atomic_write
from evener.records.schema import Noun, RunName, encode_noun, read_noun

_FILE = "runs.json"


class StudyRuns(Noun, frozen=True, kw_only=True):
    """The file.

    Attributes:
        prefix: of the names of all runs.
        names: of the last run of each trial, by its number, as text.
    """

    prefix: RunName
    names: dict[str, RunName] = {}


class RunNames:
    """See the first line.

    Args:
        folder: of the study.

    Raises:
        InvalidInput: the file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        found = read_noun(self._path, StudyRuns) if self._path.exists() else None
        self._prefix = found.prefix if found else f"tune-{secrets.token_hex(4)}"
        self._names = {int(number): name for number, name in found.names.items()} if found else {}
        if found is None:
            self._save()

    def is_own(self, name: str) -> bool:
        """Whether a run is one of this study."""
        return name.startswith(f"{self._prefix}-")

    def wanted(self, number: int) -> str:
        """What the run of a trial is to be called, if there was none of that name."""
        return f"{self._prefix}-{number:04d}"

    def of(self, number: int) -> str | None:
        """The name of a trial's run; None if it has none."""
        return self._names.get(number)

    def number_of(self, name: str) -> int | None:
        """Whose run it is."""
        return next((number for number, known in self._names.items() if known == name), None)

    def note(self, number: int, name: str) -> None:
        """A trial's run is called so. Raises OSError."""
        if self._names.get(number) != name:
            self._names[number] = name
            self._save()

    def _save(self) -> None:
        names = {str(number): name for number, name in self._names.items()}
        atomic_write(self._path, encode_noun(StudyRuns(prefix=self._prefix, names=names)))
