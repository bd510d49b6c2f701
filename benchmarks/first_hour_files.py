"""The files that lie in the folder in which a new user types: good ones, and those that go wrong in the usual ways."""

from __future__ import annotations

_GOOD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from evener import Task

def data():
    drawn = torch.Generator().manual_seed(0)
    targets = torch.randint(3, (40,), generator=drawn)
    return TensorDataset(torch.randn(40, 8, generator=drawn) + targets[:, None], targets)

def task(width: int = 8):
    return Task(name="small", model=lambda: nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3)),
                loss=nn.functional.cross_entropy, train_data=data, batch_size=8, epochs=2)
"""

_MODEL = "model=lambda: nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))"
_UNUSED = """
class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        return self.used(x)

def task():
"""
_STREAM = """
from torch.utils.data import IterableDataset

class Stream(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(8), 1

def data():
    return Stream()

def task("""

FILES: dict[str, str | bytes] = {
    "small.py": _GOOD,
    "module.py": _GOOD.replace(_MODEL, "model=nn.Linear(8, 3)"),
    "no_scalar.py": _GOOD.replace("loss=nn.functional.cross_entropy", "loss=nn.CrossEntropyLoss(reduction='none')"),
    "no_pairs.py": _GOOD.replace(" + targets[:, None], targets)", ")"),
    "no_data.py": _GOOD.replace("def data():\n", "def data():\n    raise FileNotFoundError('the images')\n"),
    "nan.py": _GOOD.replace("loss=nn.functional.cross_entropy", "loss=lambda o, t: o.sum() * float('nan')"),
    "shuffled.py": _GOOD.replace(".manual_seed(0)", "\n    drawn.seed()"),
    "unused.py": _GOOD.replace("def task(width: int = 8):\n", _UNUSED).replace(_MODEL, "model=Unused"),
    "stream.py": _GOOD.replace("def task(", _STREAM),
    "number.py": "task = 7\n",
    "empty.py": "",
    "broken.py": "def task(:\n    pass\n",
    "raises.py": "from evener import Task\n\n\ndef task():\n    return 1 / 0\n",
    "imports.py": "import nosuchmodule\n",
    "plain.py": "import torch\n\nprint(torch.ones(1))\n",
    "words.txt": "only words\n",
    "record.json": "{}",
    "damaged.json": '{"kind": "plan", "strategy": ',
    "list.json": "[1, 2, 3]",
    "latin.json": b'{"kind": "pl\xe4n"}',
    "deep.json": "[" * 100_000,
}
