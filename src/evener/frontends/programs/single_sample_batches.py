"""Batches of one sample of a user's loader, as far as the sizes of its batches are known without loading any."""

from __future__ import annotations

from collections.abc import Sized
from contextlib import suppress
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from evener.records.single_sample_error import better_size

_NO_STATISTICS = "and BatchNorm cannot take statistics of one sample"


def single_sample_advice(loader: DataLoader[Any]) -> str:
    """Return advice if a batch of every epoch has one sample; empty if none has, or if sizes are unknown.

    A sampler is not iterated, because it may draw or count.
    """
    order: Any = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        is_of_parts = loader.num_workers > 1  # each worker makes batches of its own part
        return _of_rest(None if is_of_parts else loader.dataset, loader.batch_size, drop_last=loader.drop_last)
    if isinstance(order, list | tuple):
        sizes = [len(batch) if isinstance(batch, list | tuple) else 0 for batch in order]
        return _of_list(sizes) if 1 in sizes else ""
    if isinstance(order, BatchSampler) and type(order).__iter__ is BatchSampler.__iter__:
        return _of_rest(order.sampler, order.batch_size, drop_last=order.drop_last)
    return ""


def _of_rest(samples: Any, batch_size: int | None, *, drop_last: bool) -> str:
    """Return advice for batches of `batch_size` of the `samples`, whose number may be unknown, and the rest of them."""
    if batch_size == 1:
        return f"every batch has one sample, {_NO_STATISTICS}: give the loader a batch_size of 2 or more"
    count = 0
    with suppress(TypeError):  # no length
        count = len(samples) if isinstance(samples, Sized) else 0
    if batch_size is None or drop_last or count % batch_size != 1:
        return ""
    return (
        f"the last batch of every epoch has 1 of the {count} samples, {_NO_STATISTICS}: give the loader "
        f"drop_last=True, or another batch_size than {batch_size}{better_size(count, batch_size)}"
    )


def _of_list(sizes: list[int]) -> str:
    return (
        f"batch {sizes.index(1) + 1} of the {len(sizes)} batches of every epoch has one sample, {_NO_STATISTICS}: "
        "leave it out of the batch sampler, or add its sample to another batch"
    )
