"""Data sets, uneven shares of them, and which samples each rank takes in each step.

Only `loader` and `image_folder` need PyTorch; it is imported when one of the loader's names is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evener.data.division import Division
from evener.data.sampler import MicroBatch, Sampler, ShuffledSampler, StationarySampler, permutation

if TYPE_CHECKING:
    from evener.data.loader import Loader, collect, seed_all, split_batch, to_device

__all__ = [
    "Division",
    "Loader",
    "MicroBatch",
    "Sampler",
    "ShuffledSampler",
    "StationarySampler",
    "collect",
    "permutation",
    "seed_all",
    "split_batch",
    "to_device",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from evener.data import loader

    return getattr(loader, name)
