"""The thin engine beside PyTorch eager and HIPS autograd: one training step, in turn within one run, one thread each.

    python benchmarks/autodiff.py [--rounds 9] [--seconds 0.3] [--json]

Each round times a block of steps of every engine, in processor time; a ratio is that of one round, and the table shows
their median and range. PyTorch's optimiser is the fastest of its three implementations. HIPS autograd has no
convolution without SciPy: its LeNet-5 gathers the taps by slicing and multiplies matrices, as ours does. Left out where
it is not installed.
Import time and memory are those of processes of their own.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before NumPy is imported
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from results import Results, open_results, parser_of
from turns import in_turn, ratios, spread

from evener import autodiff as ad
from evener.autodiff import functional as F

BATCH, LR = 32, 0.01
Step = Callable[[], None]


def mlp(nn: Any) -> Any:
    """784-32-10, on our `nn` or PyTorch's."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10), nn.LogSoftmax(1))


def lenet(nn: Any) -> Any:
    """LeNet-5 with ReLU and max pooling."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10), nn.LogSoftmax(1),
    )  # fmt: skip


def our_step(make: Callable[[Any], Any], images: Any, labels: Any, state: Any) -> Step:
    """One step of the thin engine."""
    model = make(ad.nn)
    model.load_state_dict(state)
    optimizer, arena = ad.optim.SGD(model.parameters(), lr=LR), ad.Arena()

    def step() -> None:
        with arena:
            optimizer.zero_grad()
            loss = F.nll_loss(model(ad.from_numpy(images)), ad.from_numpy(labels))
            loss.backward()
            optimizer.step()

    return step


def torch_step(make: Callable[[Any], Any], images: Any, labels: Any, state: Any, options: dict[str, bool]) -> Step:
    """One step of PyTorch eager."""
    model = make(torch.nn)
    model.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, **options)
    x, y = torch.from_numpy(images), torch.from_numpy(labels)

    def step() -> None:
        optimizer.zero_grad()
        loss = torch.nn.functional.nll_loss(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()

    return step


def fastest_torch_step(make: Callable[[Any], Any], images: Any, labels: Any, state: Any) -> Step:
    """PyTorch's step with whichever implementation of its optimiser is the fastest here."""
    ways = [{"foreach": False}, {"foreach": True}, {"fused": True}]
    steps = [torch_step(make, images, labels, state, way) for way in ways]
    return min(steps, key=lambda step: min(block_seconds(step, 0.1) for _ in range(3)))


def hips_step(make: Callable[[Any], Any], images: Any, labels: Any, state: Any) -> Step | None:
    """One step of HIPS autograd; None where it is not installed."""
    try:
        import autograd.numpy as anp
        from autograd import grad
    except ImportError:
        return None
    weights = {key: value.numpy().copy() for key, value in state.items()}

    def linear(p: Any, key: str, x: Any) -> Any:
        return anp.dot(x, p[f"{key}.weight"].T) + p[f"{key}.bias"]

    def relu(x: Any) -> Any:
        return anp.maximum(x, 0)

    def convolution(p: Any, key: str, x: Any, padding: int) -> Any:
        w = p[f"{key}.weight"]
        filters, channels, size, _ = w.shape
        if padding:
            x = anp.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)), "constant")
        rows = x.shape[2] - size + 1
        taps = anp.stack([x[:, :, i : i + rows, j : j + rows] for i in range(size) for j in range(size)], axis=2)
        y = anp.matmul(w.reshape(filters, -1), taps.reshape(len(x), channels * size * size, rows * rows))
        return y.reshape(len(x), filters, rows, rows) + p[f"{key}.bias"].reshape(-1, 1, 1)

    def pool(x: Any) -> Any:
        n, c, rows, columns = x.shape
        return anp.max(x.reshape(n, c, rows // 2, 2, columns // 2, 2), axis=(3, 5))

    def scores(p: Any) -> Any:
        if make is mlp:
            return linear(p, "3", relu(linear(p, "1", images.reshape(BATCH, -1))))
        x = pool(relu(convolution(p, "0", images, 2)))
        x = pool(relu(convolution(p, "3", x, 0))).reshape(BATCH, -1)
        return linear(p, "11", relu(linear(p, "9", relu(linear(p, "7", x)))))

    rows = np.arange(BATCH)

    def loss(p: Any) -> Any:
        y = scores(p)
        y = y - anp.max(y, axis=1, keepdims=True)
        log_probabilities = y - anp.log(anp.sum(anp.exp(y), axis=1, keepdims=True))
        return -anp.mean(log_probabilities[rows, labels])

    gradient = grad(loss)

    def step() -> None:
        for key, change in gradient(weights).items():
            weights[key] -= np.float32(LR) * change

    return step


def block_seconds(step: Step, seconds: float) -> float:
    """Processor seconds a step, over a block of about `seconds`: what others do on the machine counts least so."""
    step()
    start = time.process_time()
    step()
    count = max(1, int(seconds / max(time.process_time() - start, 1e-5)))
    start = time.process_time()
    for _ in range(count):
        step()
    return (time.process_time() - start) / count


def step_seconds(make: Callable[[Any], Any], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Processor seconds that a step of one model takes every engine, by rounds."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((BATCH, 1, 28, 28), np.float32)
    labels = rng.integers(0, 10, BATCH)
    torch.manual_seed(0)
    state = make(torch.nn).state_dict()
    engines = {
        "evener": our_step(make, images, labels, state),
        "PyTorch eager": fastest_torch_step(make, images, labels, state),
        "HIPS autograd": hips_step(make, images, labels, state),
    }
    ways = {engine: partial(block_seconds, step, seconds) for engine, step in engines.items() if step is not None}
    return in_turn(ways, rounds, warm_up=0)


def compare(results: Results, name: str, times: dict[str, list[float]]) -> None:
    """Our microseconds, and the others' ratios to them."""
    for engine, seconds in times.items():
        row = {"model": name, "engine": engine, "batch": BATCH, "microseconds": median(seconds) * 1e6}
        if engine == "evener":
            results.add("{model}, batch {batch}, SGD: evener {microseconds:.0f} us a step", **row)
        else:
            ratio = ratios(seconds, times["evener"])
            results.add("  {engine:14} takes {ratio:.2f} times as long", **row, ratio=ratio)


IMPORT = "import time; t = time.perf_counter(); import evener.autodiff; print(time.perf_counter() - t)"
NUMPY = "import time; t = time.perf_counter(); import numpy; print(time.perf_counter() - t)"
MEMORY = """
import os
import numpy as np
from evener import autodiff as ad
from evener.autodiff import functional as F, nn, optim
model = nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10), nn.LogSoftmax(1))
optimizer, arena = optim.SGD(model.parameters(), lr=0.01), ad.Arena()
images, labels = np.zeros((32, 784), np.float32), np.zeros(32, np.int64)
for _ in range(2000):
    with arena:
        optimizer.zero_grad()
        F.nll_loss(model(ad.from_numpy(images)), ad.from_numpy(labels)).backward()
        optimizer.step()
print(int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6)
"""


def of_a_process(code: str) -> float:
    """The number that a fresh Python prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return float(done.stdout)


def main() -> None:
    """Both models, then import time and memory."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a block")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with open_results(options) as results:
        for name, make in (("MLP 784-32-10", mlp), ("LeNet-5", lenet)):
            compare(results, name, step_seconds(make, options.rounds, options.seconds))
        for module, code in (("evener.autodiff", IMPORT), ("numpy", NUMPY)):
            seconds = spread(of_a_process(code) for _ in range(7))
            results.add("import {module}: {seconds:.3f} s", module=module, seconds=seconds)
        memory = of_a_process(MEMORY)
        results.add("resident memory of a process that trains the MLP: {resident_mb:.1f} MB", resident_mb=memory)


if __name__ == "__main__":
    main()
