"""BatchTasks of every kind, small enough to be trained many times: `task(kind)`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from evener import BatchTask

WORDS = 11


def numbers(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :1].sin() + x[:, 1:2])


class Sentences(Dataset[Any]):
    """Words of different numbers, each predicted from itself; as dicts."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        sizes = torch.randint(1, 7, (count,), generator=draw).tolist()
        self.samples = [torch.randint(1, WORDS, (size,), generator=draw) for size in sizes]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"words": self.samples[index], "labels": (self.samples[index] * 3) % WORDS}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    pad = nn.utils.rnn.pad_sequence
    return {
        "words": pad([one["words"] for one in samples], batch_first=True),
        "labels": pad([one["labels"] for one in samples], batch_first=True, padding_value=-100),
    }


class Stream(IterableDataset[Any]):
    def __init__(self, count: int, seed: int) -> None:
        self.data = numbers(count, seed)

    def __iter__(self) -> Iterator[Any]:
        yield from (self.data[index] for index in range(len(self.data)))


class LongStream(Stream):
    """One that says how long it is."""

    def __len__(self) -> int:
        return len(self.data)


class Noisy(Dataset[Any]):
    """Numbers under a random transform."""

    def __init__(self, count: int, seed: int) -> None:
        self.data = numbers(count, seed)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + 0.1 * torch.randn(5), y


def regressor() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


def tagger() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, WORDS))


def squares(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    loss: Tensor = functional.mse_loss(model(x), y)
    return loss


def tags(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["words"]).flatten(0, 1), batch["labels"].flatten())


def tag_sums(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    outputs = model(batch["words"]).flatten(0, 1)
    return functional.cross_entropy(outputs, batch["labels"].flatten(), reduction="sum"), num_tags(batch)


def num_tags(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"] != -100).sum()


def right_tags(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return (model(batch["words"]).argmax(2) == batch["labels"]).sum(), num_tags(batch)


def rebuilt(model: nn.Module, batch: Any) -> Tensor:
    [x] = batch
    loss: Tensor = (model(x) - x).square().sum()
    return loss


def largest_error(model: nn.Module, run: Any) -> Mapping[str, Any]:
    x, y = numbers(12, 3).tensors
    dtype = next(model.parameters()).dtype
    errors = (model(x.to(dtype)) - y.to(dtype)).square().flatten()
    own = torch.arange(len(errors)) % run.size == run.rank
    return {"loss": run.sum(float(errors[own].sum())) / 12, "rows": float(len(run.gather(errors[own])))}


_SENTENCES: dict[str, Any] = {
    "model": tagger,
    "train_data": lambda: Sentences(26, 1),
    "collate": padded,
    "validation_data": lambda: Sentences(11, 2),
    "metrics": {"accuracy": right_tags, "sentences": lambda _, batch: torch.ones(())},
}
_NUMBERS: dict[str, Any] = {"model": regressor, "loss": squares, "train_data": lambda: numbers(26, 1)}


def tossed(model: nn.Module, batch: Any) -> Tensor:
    """Draw numbers for the whole batch: PyTorch's, Python's and NumPy's."""
    coin = torch.rand((), dtype=batch[0].dtype) + random.random() + float(np.random.rand())
    return functional.mse_loss(model(batch[0] * (1 + coin)), batch[1])


KINDS: dict[str, dict[str, Any]] = {
    "count": {**_SENTENCES, "loss": tags, "count": num_tags},
    "ratio": {**_SENTENCES, "loss": tag_sums},
    "miscounted": {**_SENTENCES, "loss": tags},
    "sum": {
        "model": lambda: nn.Linear(5, 5),
        "loss": rebuilt,
        "count": "sum",
        "train_data": lambda: TensorDataset(numbers(26, 1).tensors[0]),
        "validation_data": lambda: TensorDataset(numbers(9, 2).tensors[0]),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
        "clip_norm": 0.5,
    },
    "coin": {**_NUMBERS, "loss": tossed},
    "stream": {**_NUMBERS, "train_data": lambda: Stream(26, 1), "validation_data": lambda: Stream(11, 2)},
    "long stream": {**_NUMBERS, "train_data": lambda: LongStream(26, 1)},
    "noisy": {
        **_NUMBERS,
        "model": smooth,  # of a bias before a BatchNorm the gradient is rounding, which Adam makes steps of
        "train_data": lambda: Noisy(26, 1),
        "optimizer": lambda model: torch.optim.Adam(model.parameters(), lr=0.02),
    },
    "closure": {
        **_NUMBERS,
        "model": smooth,
        "optimizer": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4),
    },
    "plateau": {
        **_NUMBERS,
        "validation_data": lambda: numbers(11, 2),
        "scheduler": lambda o, _: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.1, threshold=0.2),
        "epochs": 4,
    },
    "schedule": {**_NUMBERS, "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR},
    "validate": {**_NUMBERS, "model": smooth, "validate": largest_error},
}


def task(kind: str = "count", batch_size: int = 8) -> BatchTask:
    return BatchTask(**{"name": kind, "batch_size": batch_size, "epochs": 2, **KINDS[kind]})


def of_kind(kind: str) -> Callable[[], BatchTask]:
    return lambda: task(kind)
