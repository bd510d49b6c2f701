"""A stand-in for ClearML."""

from typing import Any

from support.tracker_site.tracker_calls import Recorder

__version__ = "2.0.0"


class Task:
    _current: Recorder | None = None

    @classmethod
    def current_task(cls) -> Recorder | None:
        return cls._current

    @classmethod
    def init(cls, **words: Any) -> Recorder:
        cls._current = Recorder("clearml.task")
        Recorder("clearml.Task.init")(**words)
        return cls._current


def __getattr__(name: str) -> Any:
    return getattr(Recorder("clearml"), name)
