"""A stand-in for MLflow."""

from typing import Any

from support.tracker_site.tracker_calls import Recorder

__version__ = "3.0.0"
_runs: list[Recorder] = []


def active_run() -> Recorder | None:
    return _runs[-1] if _runs else None


def start_run(**words: Any) -> Recorder:
    _runs.append(Recorder("mlflow.start_run")(**words))
    return _runs[-1]


def end_run(**words: Any) -> None:
    Recorder("mlflow.end_run")(**words)
    _runs.clear()


def __getattr__(name: str) -> Any:
    return getattr(Recorder("mlflow"), name)
