"""What nodes do that are left when others of a training are lost: they go on from the last epoch that was saved.

Ultralytics' loop cannot be left in the middle of a batch, and its last checkpoint holds all that it needs. So nodes are
started anew, as by `evener yolo train resume`, and divide the batches among themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from evener.frontends.yolo.words import YoloConfig, read_words
from evener.launch.nodes import shares_of
from evener.records.record import Event


def without(config: YoloConfig, kept: Sequence[int], lost: Event) -> YoloConfig | None:
    """What is asked of the nodes that are left; None: the training cannot go on.

    Args:
        config: what was asked of all, with the folder of the results.
        kept: positions of those that are left among all.
        lost: what is told of the others.
    """
    shares = shares_of(config.shares, kept)
    if not config.elastic or config.stationary or shares is None:
        return None
    words = config.words
    last = Path(read_words(words)["save_dir"]) / "weights" / "last.pt"
    if last.is_file():
        if is_complete(last):
            return None
        words = ("train", f"resume={last}")
    return msgspec.structs.replace(config, words=words, shares=shares, lost=(*config.lost, lost))


def is_complete(checkpoint: Path) -> bool:
    """Whether there is nothing to go on with: all epochs are over, and what only training needs was taken out."""
    return bool(torch.load(checkpoint, map_location="cpu", weights_only=False)["epoch"] < 0)
