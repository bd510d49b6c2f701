"""Batches are what the sampler says, random transforms included, and the training's random state is left alone."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from evener.data.loader import Loader, collect, sample_seeds, split_batch
from evener.data.sampler import Division, ShuffledSampler
from evener.oracle.apportion import weights_to_workers
from evener.records.errors import InvalidInput
from support.refusals import refused


class Noisy(Dataset[Any]):
    """Sample i is i plus random noise."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.full((2,), float(i)) + torch.rand(2), i


def load(rank: int, weights: list[float], dataset: Dataset[Any], workers: int = 0) -> dict[int, list[float]]:
    """Target -> inputs of two epochs' samples, as this rank loads them."""
    division = Division(weights_to_workers(weights, [None] * len(weights)))
    sampler = ShuffledSampler(count=12, batch_size=5, accumulate=1, seed=1, rank=rank, division=division)
    loader = Loader(dataset, sampler, first=1, last=3, device=torch.device("cpu"), seed=7, workers=workers)
    found = {}
    for _ in range(3):
        for part, inputs, targets in loader.next_step():
            if len(part.indices):
                assert targets.tolist() == part.indices.tolist()
                found.update(dict(zip(targets.tolist(), inputs.tolist(), strict=True)))
    return found


def test_random_transforms_are_independent_of_the_loading_rank() -> None:
    alone = load(0, [1.0], Noisy())
    first, second = load(0, [2.0, 1.0], Noisy()), load(1, [2.0, 1.0], Noisy())
    assert {**first, **second} == alone
    assert len(first) + len(second) == 12


def test_worker_processes_load_the_same_batches() -> None:
    assert load(0, [1.0], Noisy(), workers=1) == load(0, [1.0], Noisy())


def test_training_random_state_is_preserved() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    torch.manual_seed(5)
    load(0, [1.0], Noisy())
    assert torch.rand(3).tolist() == expected


def test_rank_without_samples_loads_one_that_does_not_count() -> None:
    data = TensorDataset(torch.arange(12.0), torch.arange(12))
    division = Division(weights_to_workers([1.0, 0.0], [None, None]))
    sampler = ShuffledSampler(count=12, batch_size=6, accumulate=1, seed=1, rank=1, division=division)
    loader = Loader(data, sampler, first=1, last=2, device=torch.device("cpu"), seed=0)
    [(part, inputs, _)] = list(loader.next_step())
    assert len(part.indices) == 0
    assert len(inputs) == 1


def test_tensor_dataset_is_indexed_in_one_operation() -> None:
    data = TensorDataset(torch.arange(12.0), torch.arange(12))
    inputs, targets = collect(data, torch.tensor([3, 1]).numpy(), 0, 0)
    assert inputs.tolist() == [3.0, 1.0]
    assert targets.tolist() == [3, 1]


def test_dataset_without_pairs_is_refused() -> None:
    with refused(InvalidInput):
        split_batch((1, 2, 3))
    with refused(InvalidInput):
        split_batch(torch.zeros(2))


def test_sample_seed_depends_only_on_seed_epoch_and_sample() -> None:
    every = sample_seeds(3, 0, np.arange(10_000))
    assert len(np.unique(every)) > 9_990  # 32 bits: a few may meet by chance
    assert sample_seeds(3, 0, np.array([4711])).tolist() == [every[4711]]
    assert not np.intersect1d(every[:100], sample_seeds(3, 1, np.arange(100))).size
    assert not np.intersect1d(every[:100], sample_seeds(4, 0, np.arange(100))).size


def test_custom_collate_function_builds_the_batch() -> None:
    indices = np.array([3, 1], dtype=np.int64)
    samples = collect(Noisy(), indices, 7, 0, lambda samples: samples)
    inputs, targets = collect(Noisy(), indices, 7, 0)
    assert [target for _, target in samples] == targets.tolist() == [3, 1]
    assert torch.equal(torch.stack([tensor for tensor, _ in samples]), inputs)
