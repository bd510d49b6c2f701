"""The loader that stands for Ultralytics' own: the parts of all ranks make up the batches of one process."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

from evener.data.sampler import Division, OrderedSampler, ShuffledSampler
from evener.frontends.yolo.sharded_loader import ShardedLoader, keep_images
from evener.oracle.apportion import weights_to_workers

COUNT, BATCH = 10, 4


class Numbers:
    """Every sample is its index and a random number; `transforms` has a mosaic in it."""

    def __init__(self) -> None:
        self.mosaic = SimpleNamespace(buffer_enabled=True)
        self.transforms = SimpleNamespace(transforms=[SimpleNamespace(pre_transform=self.mosaic)])
        self.shift = 0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index + self.shift, random.random()


def loader_of(rank: int, shares: list[float], epoch: list[int], dataset: Numbers | None = None) -> ShardedLoader:
    plain = SimpleNamespace(
        dataset=dataset or Numbers(), batch_size=BATCH, num_workers=0, collate_fn=list, pin_memory=False
    )
    division = Division(weights_to_workers(shares, [None] * len(shares)))
    sampler = ShuffledSampler(count=COUNT, batch_size=BATCH, accumulate=1, seed=0, rank=rank, division=division)
    return ShardedLoader(plain, lambda: sampler, seed=0, epoch=lambda: epoch[0])


def epochs_of(rank: int, shares: list[float], order: tuple[int, ...]) -> list[list[Any]]:
    epoch = [0]
    loader, found = loader_of(rank, shares, epoch), []
    for epoch[0] in order:
        batches = []
        for batch in loader:
            assert loader.part is not None
            batches.append(batch[: len(loader.part.indices)])
        found.append(batches)
    return found


def test_parts_of_all_ranks_equal_the_batches_of_one_process() -> None:
    alone = epochs_of(0, [1], (0, 1))
    first, second = epochs_of(0, [3, 1], (0, 1)), epochs_of(1, [3, 1], (0, 1))
    for whole, one, other in zip(alone, first, second, strict=True):
        assert [a + b for a, b in zip(one, other, strict=True)] == whole
    assert [len(batch) for batch in alone[0]] == [4, 4, 2]
    assert alone[0] != alone[1]


def test_repeated_epoch_has_the_same_batches() -> None:
    again = epochs_of(0, [3, 1], (0, 1, 1, 2))
    assert again[1] == again[2] != again[3]


def test_rank_without_images_loads_one_that_does_not_count() -> None:
    loader = loader_of(1, [1, 0], [0])
    for batch in loader:
        assert loader.part is not None
        assert (len(batch), len(loader.part.indices)) == (1, 0)


def test_reset_discards_batches_loaded_before() -> None:
    dataset, epoch = Numbers(), [0]
    loader = loader_of(0, [1], epoch, dataset)
    list(loader)
    dataset.shift, epoch[0] = 100, 1
    loader.reset()
    assert all(index >= 100 for batch in loader for index, _ in batch)


def test_mosaics_choose_among_all_images() -> None:
    dataset = Numbers()
    list(loader_of(0, [1], [0], dataset))
    assert not dataset.mosaic.buffer_enabled


def test_image_buffer_for_mosaics_fills_the_available_memory() -> None:
    for imgsz, nbytes, kept in (
        (100, 0, 4),  # no fewer than Ultralytics keeps
        (100, 7 * 30_000, 7),
        ([50, 100], 7 * 30_000, 7),
        (100, 1 << 40, COUNT + 1),  # it drops one when it has so many: never
    ):
        dataset: Any = Numbers()
        dataset.max_buffer_length, dataset.imgsz, dataset.channels = 4, imgsz, 3
        keep_images(dataset, nbytes)
        assert dataset.max_buffer_length == kept


def test_dataset_without_image_buffer_stays_without() -> None:
    validation: Any = SimpleNamespace(max_buffer_length=0)
    keep_images(validation, 1 << 40)
    keep_images(SimpleNamespace(), 1 << 40)
    assert validation.max_buffer_length == 0


def test_validation_follows_data_order_and_can_be_repeated() -> None:
    plain = SimpleNamespace(dataset=Numbers(), batch_size=BATCH, num_workers=0, collate_fn=list, pin_memory=False)
    sizes = {4: (3, 1), 2: (2, 0)}
    for rank, wanted in ((0, [[0, 1, 2], [4, 5, 6], [8, 9]]), (1, [[3], [7], []])):
        sampler = OrderedSampler(count=COUNT, batch_size=BATCH, rank=rank, sizes=sizes.__getitem__)
        loader = ShardedLoader(plain, partial(_same, sampler), seed=0)
        for _ in range(2):
            seen = []
            for _ in loader:
                assert loader.part is not None
                seen.append(loader.part.indices.tolist())
            assert seen == wanted


def _same(sampler: OrderedSampler) -> OrderedSampler:
    return sampler
