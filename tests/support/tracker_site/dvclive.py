"""A stand-in for DVCLive."""

from typing import Any

from support.tracker_site.tracker_calls import Recorder

__version__ = "3.48.0"


def Live(**words: Any) -> Recorder:
    return Recorder("dvclive")(**words)
