"""A stand-in for Comet."""

from typing import Any

from support.tracker_site.tracker_calls import Recorder

__version__ = "3.58.0"
_running: list[Recorder] = []


def start(**words: Any) -> Recorder:
    Recorder("comet.start")(**words)
    _running.append(Recorder("comet.experiment"))
    return _running[-1]


def get_running_experiment() -> Recorder | None:
    return _running[-1] if _running else None


def __getattr__(name: str) -> Any:
    return getattr(Recorder("comet"), name)
