"""One model on uneven nodes of this machine: real handwritten digits, an ordinary PyTorch model, nothing to download.

    evener train examples/01_one_machine.py --local-nodes 1.0,0.5
    python examples/01_one_machine.py

Both start two processes that stand for two machines, the second slowed to half the speed of the first. Evener times
the model on both, shares out every batch of 128 samples accordingly, and gives the second less work, not the same.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener import Task
from evener.commands.train import perform
from evener.config.run_config import RunConfig
from evener.data.digits import load_digits, split_digits


class Net(nn.Module):
    """[N, 1, 8, 8] -> [N, 10]. Its BatchNorms normalise by the samples of all nodes together."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(16 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images).flatten(1))
        return logits


def data(part: int) -> TensorDataset:
    """Training (0) or validation samples (1). Every rank calls this for itself and has to get the same."""
    images, labels = load_digits()
    chosen = split_digits(labels)[part]
    inputs = torch.from_numpy(images[chosen]).unsqueeze(1).float() / 16
    return TensorDataset(inputs, torch.from_numpy(labels[chosen]).long())


def task(width: int = 64, lr: float = 0.02) -> Task:
    """What `evener train` looks for; its arguments are options: `--option width=128 --option lr=0.01`."""
    return Task(
        name="one-machine",
        model=lambda: Net(width),
        loss=nn.functional.cross_entropy,  # the mean over the samples that it is given
        train_data=lambda: data(0),
        validation_data=lambda: data(1),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        batch_size=128,  # of one step over all nodes together
        epochs=4,
    )


def main() -> None:
    """The same run without the command line."""
    record = perform(RunConfig(task=__file__, local_nodes="1.0,0.5"))
    for node in record.nodes:
        print(f"{node.name} computed {node.share:.0%} of the samples and waited {node.seconds_waiting:.1f} s")


if __name__ == "__main__":  # the ranks import this file too
    main()
