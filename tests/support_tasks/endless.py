"""A task that trains until it is stopped: for tests of what happens then."""

from tiny import data, model
from torch import nn
from torch.utils.data import TensorDataset

from evener import Task


def many() -> TensorDataset:
    return data(5000, 1)


task = Task(
    name="endless", model=model, loss=nn.functional.cross_entropy, train_data=many, batch_size=20, epochs=10_000
)
