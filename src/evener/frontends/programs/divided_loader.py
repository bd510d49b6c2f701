"""Division of a user's DataLoader: this rank loads its part of every batch of the user's sampler.

The leader iterates over the user's batch sampler and broadcasts the indices of every batch, so that any sampler works.

    the leader    batch_sampler -> indices of a batch -> broadcast
    every rank    sizes of all parts -> its part of the indices -> samples -> collate
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sized
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import msgspec
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from evener.comm.group import Group
from evener.comm.message_topics import NEXT_BATCH
from evener.data.alike import require_alike
from evener.data.fingerprint import print_of
from evener.data.loading_process import begin_process, load_in_process, received
from evener.frontends.programs.batch_parts import BatchPart, Count
from evener.frontends.programs.random_state import take_leaders_state
from evener.frontends.programs.sampler_changes import SamplerChanges
from evener.records.decoding import decode_msgpack
from evener.records.errors import InvalidInput, NodeLost
from evener.records.single_sample_error import better_size
from evener.system.process_exit import own_worker_sockets

_TAKEN_OVER = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
               "prefetch_factor", "persistent_workers", "in_order")  # fmt: skip


class Divider(Protocol):
    """The interface of a run for its loaders."""

    group: Group

    @property
    def draws_alike(self) -> bool:
        """Whether all ranks copy the random state of the first rank before every batch."""
        ...

    @property
    def loads_alike(self) -> bool:
        """Whether all ranks load the same samples."""
        ...

    def part_of(self, count: int, is_training: bool) -> BatchPart:
        """Return this rank's part of a batch of `count` samples."""
        ...

    def is_training(self) -> bool:
        """Whether the program is training now."""
        ...

    def is_in_thread(self) -> bool:
        """Whether another thread of the program calls this, or has called it; the run is then refused."""
        ...

    def begin(self, loader: DividedLoader) -> int | None:
        """Begin a pass through `loader`; in a forked replica, return the samples of each batch."""
        ...

    def loading(self, owner: object) -> None:
        """Begin to load a batch of `owner`."""
        ...

    @property
    def limit(self) -> int | None:
        """In a forked replica, the samples of each batch."""
        ...

    def loaded(self, loader: DividedLoader, part: BatchPart, batch: Any) -> Any:
        """Begin to compute `part`; return the batch for the program."""
        ...

    def moves_statistics(self) -> bool:
        """Whether norms have computed in training mode since the current pass began."""
        ...

    def end(self, loader: DividedLoader, is_over: bool) -> None:
        """End the pass through `loader`, either at its end (`is_over`) or before it."""
        ...


class DividedLoader:
    """An iterable over this rank's parts of the batches of a user's loader; other attributes are the loader's.

    Args:
        loader: the user's.
        divider: the run.
        count: divisor of the mean loss of a batch.

    Attributes:
        skip: number of batches to skip in the next pass, as they were trained on before a checkpoint.

    Raises:
        InvalidInput: its batches cannot be divided.
    """

    def __init__(self, loader: DataLoader[Any], divider: Divider, count: Count) -> None:
        self.loader, self.count = loader, count
        self.skip = 0
        self._divider = divider
        if loader.num_workers:
            own_worker_sockets()
        self._unfinished: object = None  # in a forked replica: an iterator whose end would stop the rank's workers
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        _refuse_indivisible(loader)
        taken = {name: getattr(loader, name) for name in _TAKEN_OVER if hasattr(loader, name)}
        taken = {name: value for name, value in taken.items() if name in inspect.signature(DataLoader).parameters}
        taken["worker_init_fn"] = partial(begin_process, init=loader.worker_init_fn)
        self._order = _Order(loader, divider)
        if self._is_stream:
            parts: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            self._inner: DataLoader[Any] = DataLoader(loader.dataset, collate_fn=_samples, **parts, **taken)
        else:
            fetch = _FetchPart(loader.dataset, loader.collate_fn)
            order: Any = self._order  # of more than indices
            self._inner = DataLoader(fetch, batch_sampler=order, collate_fn=_as_it_is, **taken)

    def __len__(self) -> int:
        """Return the number of batches, as in one process."""
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def lone_sample(self) -> str:
        """Return advice if a batch of every epoch has one sample; empty if none has, or if sizes are unknown."""
        return single_sample_advice(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self._divider.is_in_thread():  # refused in the main thread, where an error ends the program
            return iter(())
        limit = self._divider.begin(self)
        self._order.skip, self.skip = self.skip, 0
        if limit is not None:
            return self._through(self._small_batches(limit), is_small=True)
        self._order.is_training = self._divider.is_training()
        return self._through(self._batches(iter(self._inner)))  # `iter` draws from the generators now

    def _through(self, batches: Iterator[tuple[BatchPart, Any]], is_small: bool = False) -> Iterator[Any]:
        try:
            while True:
                self._divider.loading(self)
                limit = self._divider.limit
                if limit is not None and not is_small:  # this process is now a replica, without workers
                    self._unfinished, batches, is_small = batches, self._small_batches(limit), True
                item = next(batches, None)
                if item is None:
                    break
                yield self._divider.loaded(self, *item)
        except BaseException:  # the program left the loop, perhaps by an error that has already ended other nodes
            with suppress(NodeLost):
                self._divider.end(self, is_over=False)
            raise
        else:
            self._divider.end(self, is_over=True)

    def _batches(self, inner: Iterator[Any]) -> Iterator[tuple[BatchPart, Any]]:
        """Yield this rank's parts."""
        if not self._is_stream:
            yield from received(inner)
            return
        for _, samples in islice(received(inner), self._order.skip, None):
            require_alike(self._divider.group, float(len(samples)), "the nodes read batches of different sizes")
            require_alike(self._divider.group, print_of(samples[:1]), "a stream must be the same on all nodes: seed it")
            yield self._part_of_samples(samples)

    def _small_batches(self, limit: int) -> Iterator[tuple[BatchPart, Any]]:
        """Yield parts of the first `limit` samples of every batch, loaded in this process."""
        if self._is_stream:
            samples, most = iter(self.loader.dataset), min(limit, self.loader.batch_size or limit)
            while some := list(islice(samples, most)):
                yield self._part_of_samples(some)
            return
        self._order.is_training, self._order.limit, self._order.skip = True, limit, 0
        fetch = _FetchPart(self.loader.dataset, self.loader.collate_fn)
        for chosen in self._order:
            yield fetch.__getitems__(chosen)

    def _part_of_samples(self, samples: list[Any]) -> tuple[BatchPart, Any]:
        divider = self._divider
        part = divider.part_of(len(samples), divider.is_training())
        return part, self.loader.collate_fn(samples[part.rows])


class _Order:
    """The batches of a loader, in order: (this rank's part, the indices of its samples).

    Attributes:
        is_training: whether the pass trains; otherwise every rank has samples, as programs count evaluated samples.
        limit: largest number of samples of a batch; None for all.
        skip: number of batches to skip at the beginning.
    """

    def __init__(self, loader: DataLoader[Any], divider: Divider) -> None:
        self._loader, self._divider = loader, divider
        self._sampler = SamplerChanges(loader.batch_sampler, loader.dataset)
        self.is_training = True
        self.limit: int | None = None
        self.skip = 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[BatchPart, list[Any]]]:
        group = self._divider.group
        batches = islice(self._leaders_batches(), self.skip, None)
        is_whole = self.is_training or self._divider.loads_alike
        for indices, is_joined in _each_once(batches) if is_whole else self._large_enough(batches):
            if self._divider.draws_alike:  # for transforms, too; only the leader's sampler has drawn
                take_leaders_state(group)
            chosen = indices[: self.limit]
            part = replace(self._divider.part_of(len(chosen), self.is_training), is_joined=is_joined)
            yield part, chosen[part.rows]

    def _leaders_batches(self) -> Iterator[list[Any]]:
        """Yield the indices of every batch of the leader's sampler.

        Changes of the sampler are compared at the beginning, after 1, 2, 4, 8 ... batches, and at the end.
        """
        group, number = self._divider.group, 0
        own: Any = self._loader.batch_sampler
        leaders = iter(own if group.is_leader else ())
        while True:
            batch = next(leaders, None) if group.is_leader else None
            message = b"" if batch is None else msgspec.msgpack.encode([_plain(index) for index in batch])
            message = group.broadcast(message, NEXT_BATCH)
            if self.is_training and self.limit is None and (not message or number & (number - 1) == 0):
                self._sampler.require_same_changes(group)
            if not message:
                return
            yield [tuple(one) if isinstance(one, list) else one for one in decode_msgpack(message)]
            number += 1

    def _large_enough(self, batches: Iterator[list[Any]]) -> Iterator[tuple[list[Any], bool]]:
        """Yield all samples; combine the last two batches if the last is smaller than the group.

        If the pass moves statistics of norms, batches stay separate, because each of them updates the statistics.
        """
        least, held, is_joined = self._divider.group.size, list[Any](), False
        for batch in batches:
            is_joined = len(held) > 0 and len(batch) < least and not self._divider.moves_statistics()
            if held and not is_joined:
                yield held, False
                held = []
            held = [*held, *batch]
        if 0 < len(held) < least and not self._divider.moves_statistics():
            raise InvalidInput(f"an evaluation of {len(held)} samples cannot be divided among {least} nodes")
        if held:
            yield held, is_joined


def _plain(index: Any) -> Any:
    """Convert an index of NumPy or a tensor to an int, so that it can be sent."""
    return operator.index(index) if hasattr(index, "__index__") else index


def _each_once(batches: Iterator[list[Any]]) -> Iterator[tuple[list[Any], bool]]:
    """Yield every batch separately."""
    for batch in batches:
        yield batch, False


class _FetchPart(Dataset[Any]):
    """A data set that fetches all samples of a part at once, in a loader's worker process."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._dataset, name)  # for a worker_init_fn that looks at its data set

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("this data set is read by whole parts of batches")

    def __getitems__(self, chosen: tuple[BatchPart, list[Any]]) -> tuple[BatchPart, Any]:
        part, indices = chosen
        dataset: Any = self._dataset
        whole = getattr(dataset, "__getitems__", None)

        def load() -> Any:
            return self._collate(whole(indices) if whole else [dataset[index] for index in indices])

        return part, load_in_process(load, explains=False)


def _as_it_is(batch: Any) -> Any:
    return batch


def _samples(batch: list[Any]) -> tuple[None, Any]:
    """Return samples of a stream in the format of other batches."""
    return None, load_in_process(lambda: batch, explains=False)


def _refuse_indivisible(loader: DataLoader[Any]) -> None:
    """Raise InvalidInput if batches cannot be divided, or are divided already."""
    if isinstance(loader.sampler, DistributedSampler):
        raise InvalidInput("run.prepare divides every batch itself: leave the DistributedSampler out")
    if loader.batch_size is None and loader.batch_sampler is None:
        raise InvalidInput(
            "a loader with batch_size=None gives whole batches of the data set's own, which cannot be divided: "
            "let the data set give samples and the loader a batch_size, or give every batch to run.share"
        )


def require_same_size(group: Group, loader: DataLoader[Any]) -> None:
    """Raise InvalidInput if the data set of a loader has another number of samples on another rank; all call this."""
    what = (
        "a data set must have as many samples on all nodes; if each node made it of its part of other data, combine "
        "the parts by evener.gather. Numbers of samples"
    )
    require_alike(group, len(loader.dataset) if isinstance(loader.dataset, Sized) else -1, what)


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
