"""A stand-in for Weights & Biases, which leaves the file of a run as it does."""

from pathlib import Path
from typing import Any

from support.tracker_site.tracker_calls import Recorder

__version__ = "0.31.0"
run: Recorder | None = None


def init(**words: Any) -> None:
    global run
    number = words.pop("id")
    folder = Path(words["dir"]) / "wandb" / f"run-{number}"
    Recorder("wandb.init")(**words, id=number if words["resume"] else "")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"run-{number}.wandb").touch()
    run = Recorder("wandb.run")


def finish(**words: Any) -> None:
    global run
    if run is not None:
        Recorder("wandb.finish")(**words)
    run = None


def __getattr__(name: str) -> Any:
    return getattr(Recorder("wandb"), name)
