"""Turns a sampler's indices into batches of tensors, in worker processes if asked for.

Random transforms draw from a generator seeded by (seed, epoch, sample), so that a sample looks the same whichever rank
loads it: the result of a run does not depend on the division. The training's own random state is left as it was.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from evener.data.loading_process import begin_process, load_in_process, received
from evener.data.sampler import Indices, MicroBatch, Sampler, stream
from evener.records.errors import InvalidInput, noting
from evener.system import accelerators
from evener.system.awaited_files import prefetch_files
from evener.system.process_exit import own_worker_sockets
from evener.tracer.nested import map_values


def labels_of(dataset: Dataset[Any]) -> NDArray[Any]:
    """Classes of all samples, shape (N,): the data set's `targets`, or the second tensor of a TensorDataset.

    Raises:
        InvalidInput: the data set has neither; says what to write.
    """
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return np.asarray(dataset.tensors[1])
    targets = getattr(dataset, "targets", None)
    if targets is None:
        kind = type(dataset).__name__
        raise InvalidInput(
            f"class-balanced shares need the class of every sample, and {kind} has no `targets`: set Task.labels"
        )
    return np.asarray(targets)


def count_samples(data: Dataset[Any]) -> int:
    """Samples of a map-style data set. Raises InvalidInput: it is none."""
    if isinstance(data, IterableDataset) or not isinstance(data, Sized):
        raise InvalidInput(
            f"{type(data).__name__} has no len(), or no samples by number: streams are trained by a BatchTask, or by a "
            "program that calls evener.join()"
        )
    return len(data)


_PREFETCH = 2

Collate = Callable[[list[Any]], Any]
"""Samples -> a batch of them."""


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the CPU's random states (torch, Python, NumPy) afterwards."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def seed_all(*entropy: int, stream: int = 0, device: torch.device | None = None) -> None:
    """Seed the CPU's random generators (torch, Python, NumPy's global one), and `device`'s, from whole numbers.

    Args:
        entropy: the same on all ranks, on which Python and NumPy then draw the same, such as a coin for the batch.
        stream: number of PyTorch's stream of random numbers; 0 is that of a single process.
        device: of this rank.
    """
    _seed_cpu(_seed_of(*entropy))
    for generator in accelerators.generators(device or accelerators.CPU):
        generator.manual_seed(_seed_of(*entropy, stream))


def _seed_of(*entropy: int) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint32)[0])


def _seed_cpu(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


class _Fetch(Dataset[Any]):
    """Fetches all samples of a micro-batch at once; what a loader's worker process runs."""

    def __init__(self, dataset: Dataset[Any], seed: int, collate: Collate | None) -> None:
        self.dataset, self.seed, self.collate = dataset, seed, collate

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("this data set is read by whole micro-batches")

    def __getitems__(self, part: MicroBatch) -> tuple[MicroBatch, Any]:
        # A rank without samples still joins every collective: it loads the first one, which will count for nothing.
        indices = part.indices if len(part.indices) else np.zeros(1, dtype=np.int64)
        load = partial(collect, self.dataset, indices, self.seed, part.epoch, self.collate)
        return part, load_in_process(load, explains=True)


def collect(dataset: Dataset[Any], indices: Indices, seed: int, epoch: int, collate: Collate | None = None) -> Any:
    """The samples `indices` of `dataset` as they are in `epoch`, as one batch: (inputs, targets) by default.

    A data set may have `collate_fn`, which makes the batch unless `collate` does, and `set_epoch`, which is called with
    the epoch.
    """
    if isinstance(dataset, TensorDataset):
        index = torch.from_numpy(indices)
        return tuple(tensor[index] for tensor in dataset.tensors)
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    default: Collate = getattr(dataset, "collate_fn", default_collate)
    samples = read_samples(dataset, indices, seed, epoch)
    with noting(f"data, where a batch is made of samples {', '.join(map(str, indices[:3].tolist()))} ..."):
        return (collate or default)(samples)


def read_samples(dataset: Dataset[Any], indices: Indices, seed: int, epoch: int) -> list[Any]:
    """The samples `indices` of `dataset`, each with random numbers of its own."""
    samples = []
    with random_state_kept():
        prefetch_files(lambda index: dataset[index], indices.tolist())
        for i, own_seed in zip(indices.tolist(), sample_seeds(seed, epoch, indices).tolist(), strict=True):
            _seed_cpu(own_seed)
            with noting(f"data, at sample {i}"):
                samples.append(dataset[i])
    return samples


def sample_seeds(seed: int, epoch: int, indices: Indices) -> npt.NDArray[np.uint32]:
    """A seed for every one of the samples `indices` in `epoch`: the finaliser of splitmix64 (Steele et al., 2014)."""
    base = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)
    z = base + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    seeds: npt.NDArray[np.uint32] = (z >> np.uint64(32)).astype(np.uint32)
    return seeds


def open_batches(
    dataset: Dataset[Any],
    sampler: Sampler,
    *,
    first: int,
    last: int,
    seed: int,
    workers: int = 0,
    pinned: bool = False,
    collate: Collate | None = None,
) -> Iterator[tuple[MicroBatch, Any]]:
    """The micro-batches of the steps `first` to `last` of one rank, loaded ahead by so many processes.

    A rank without samples is given one all the same, which is to count for nothing: it takes part in what all do.
    """
    if workers:
        own_worker_sockets()
    loader = DataLoader(
        _Fetch(dataset, seed, collate),
        batch_sampler=stream(sampler, first, last),  # type: ignore[arg-type]
        collate_fn=_as_it_is,
        num_workers=workers,
        prefetch_factor=_PREFETCH if workers else None,
        generator=torch.Generator().manual_seed(seed),
        pin_memory=pinned,
        worker_init_fn=begin_process,
    )
    return received(iter(loader))


class Loader:
    """Batches of one rank, in order of steps.

    Args:
        dataset: map-style, of (inputs, target) pairs.
        sampler: says which samples.
        first: step to begin with.
        last: step to end with.
        device: that the batches are moved to.
        seed: of random transforms.
        workers: processes that load ahead; 0 to load in this one.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: Sampler,
        *,
        first: int,
        last: int,
        device: torch.device,
        seed: int,
        workers: int = 0,
    ) -> None:
        self._device = device
        pinned = accelerators.capabilities(device).has_pinned_memory
        self._batches = open_batches(
            dataset, sampler, first=first, last=last, seed=seed, workers=workers, pinned=pinned
        )

    @staticmethod
    def lead(workers: int) -> int:
        """Steps that a loader with `workers` processes may be ahead, at most."""
        return workers * _PREFETCH

    def next_step(self) -> Iterator[tuple[MicroBatch, Any, Any]]:
        """The micro-batches of the next step: (which, inputs, targets), the tensors on the device."""
        while True:
            part, batch = next(self._batches)
            inputs, targets = split_batch(batch)
            yield part, to_device(inputs, self._device), to_device(targets, self._device)
            if part.is_last:
                return


def _as_it_is(batch: Any) -> Any:
    return batch


def split_batch(batch: Any) -> tuple[Any, Any]:
    """(inputs, targets) of a collated batch. Raises InvalidInput if the data set does not give pairs."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    kind = f"{len(batch)} values" if isinstance(batch, tuple | list) else type(batch).__name__
    raise InvalidInput(f"the data set of a task must give (inputs, target) pairs, got {kind}")


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with all tensors in tuples, lists and dicts on `device`, and all else that knows how to go there."""

    def move(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.to(device, non_blocking=True)
        return item.to(device) if hasattr(item, "to") else item

    return map_values(value, move)


class SeededSamples(Dataset[Any]):
    """The samples of `dataset`, random transforms drawn from (seed, epoch, index).

    Args:
        dataset: map-style, with whole numbers as indices.
        seed: of the run.

    Attributes:
        epoch: whose samples are read next; `set_epoch` of a data set that has it is called.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset: Any = dataset
        self.epoch, self._seed = 0, seed

    def __len__(self) -> int:
        return sample_count(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        return read_samples(self.dataset, np.asarray(indices, dtype=np.int64), self._seed, self.epoch)


def sample_count(data: object) -> int:
    """Samples of a map-style data set. Raises InvalidInput: it does not say how many."""
    if not isinstance(data, Sized):
        raise InvalidInput(f"{type(data).__name__} has no len(): give the class of the data a __len__")
    return len(data)
