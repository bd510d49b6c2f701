"""Stand-ins for experiment trackers, which write down how Ultralytics calls them: `wandb.run.log(lr/pg0, epoch)`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Recorder:
    """An object of a tracker, any attribute of which can be called.

    Args:
        name: of it, as in calls.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(f"{self._name}.{name}")

    def __call__(self, *args: Any, **words: Any) -> Recorder:
        with Path(os.environ["TRACKER_CALLS"]).open("a", encoding="utf-8") as file:
            named = [f"{name}={_in_short(value)}" for name, value in words.items()]
            file.write(f"{self._name}({', '.join([*map(_in_short, args), *named])})\n")
        return Recorder(self._name)

    def __str__(self) -> str:
        return self._name

    def __iter__(self) -> Any:
        return iter(())

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _in_short(value: Any) -> str:
    """Keys without their values, numbers and names; folders and objects are left out."""
    if isinstance(value, Mapping):
        return f"{{{' '.join(sorted(map(str, value)))}}}"
    if isinstance(value, str | Path):
        return Path(value).name
    return str(value) if value is None or isinstance(value, bool | int) else type(value).__name__
