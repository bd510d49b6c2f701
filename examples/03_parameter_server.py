"""A parameter server: one process holds the weights, uneven workers bring gradients. Who waits for whom?

    python examples/03_parameter_server.py

The same model is trained three times by three worker processes, of which the second is half as fast as the first and
the third a quarter. What differs is one word, `--agreement`:

    sync      every update waits for all workers, whose batch is divided by their speed: the same weights as one
              process would get, but the pace is that of the round trip to everybody
    async     nobody waits: a worker's gradient goes into the weights the moment it comes. It was computed from weights
              that others have changed meanwhile: it is *stale*, by as many versions as they made in between
    bounded   in between: a worker may be so many turns ahead of the slowest, and no more

The master here is a process of its own with which the workers speak over a socket. On several machines type instead

    evener up                                                     on one machine; it prints the line for the others
    evener join ADDRESS --token T                                 on each of the others
    evener train examples/03_parameter_server.py --agreement sync on the first

and every worker that is slow, comes late or dies costs what it has not finished, and nothing else.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener import Task
from evener.commands.train_by_agreement import train_by_agreement
from evener.config.run_config import RunConfig
from evener.data.digits import load_digits, split_digits
from evener.records.record import TrainRecord
from evener.records.schema import read_noun

SPEEDS = "1.0,0.5,0.25"
PROTOCOLS: tuple[dict[str, Any], ...] = (
    {"agreement": "sync"},
    {"agreement": "async"},
    {"agreement": "bounded", "staleness": 2},
)


def data(part: int) -> TensorDataset:
    """Training (0) or validation samples (1): 8x8 handwritten digits, which come with Evener."""
    images, labels = load_digits()
    chosen = split_digits(labels)[part]
    return TensorDataset(torch.from_numpy(images[chosen]).float() / 16, torch.from_numpy(labels[chosen]).long())


def task() -> Task:
    """What every worker makes for itself: the model, and the samples that the server leases to it by number.

    The optimiser is made at the server instead: workers only compute gradients.
    """
    return Task(
        name="parameter-server",
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        loss=nn.functional.cross_entropy,
        train_data=lambda: data(0),
        validation_data=lambda: data(1),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.5),
        batch_size=32,
        epochs=6,
    )


def train(protocol: dict[str, Any], folder: Path) -> TrainRecord:
    """The record of one run, on three workers that end with it."""
    train_by_agreement(RunConfig(task=__file__, output=folder, local_nodes=SPEEDS, **protocol), as_json=False)
    return read_noun(folder / "record.json", TrainRecord)


def main() -> None:
    """Train in all three ways, and compare."""
    lines = []
    for protocol in PROTOCOLS:
        with tempfile.TemporaryDirectory() as folder:
            record = train(protocol, Path(folder))
        shares = "  ".join(f"{node.share:4.0%}" for node in record.nodes)
        stale = max(node.most_stale for node in record.nodes)
        lines.append(
            f"{record.agreement:8} {record.steps[-1].step:5} updates  {record.seconds:5.1f} s  "
            f"accuracy {record.validation_accuracy or 0:.1%}  at most {stale} versions stale  shares {shares}"
        )
    print("\n" + "\n".join(lines))


if __name__ == "__main__":  # the workers import this file too
    main()
