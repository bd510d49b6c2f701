"""What a machine without PyTorch has to have: disk for the base install, memory for a worker, time to import.

    python benchmarks/thin.py --data DIR [--epochs 6] [--json]

The base install goes into a fresh virtual environment of its own (`pip install` fetches what it needs). The workers are
`evener join --thin` of that environment and `evener join` of this one, which has PyTorch. Both work for the same run of
the task `nfnn` (MLP 784-32-10, batch 32, 1500 updates an epoch), one after the other. Their memory is looked at every
0.1 s; shown are the largest value, which they have while they read their data, and the median from then on, while they
train. Their data, 60 000 images of 784 bytes and as many labels, is taken off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
from results import Results, open_results, parser_of
from turns import spread

from evener.data.tasks.load import load_thin_task

ROOT = Path(__file__).parents[1]
MB = 1e6
IMPORTS = 10
TIMED = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
WARM = "import evener.autodiff, numpy"


class Memory(NamedTuple):
    """Of a process, in bytes: resident, and what would be free if it ended."""

    resident: int
    own: int


def make_environment(folder: Path) -> Path:
    """A fresh virtual environment with the base install; returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", str(ROOT)], check=True, stderr=subprocess.DEVNULL)
    return python


def packages_of(environment: Path) -> Path:
    """Where its packages are."""
    return next(environment.glob("lib/python*/site-packages"))


def disk_bytes(folder: Path) -> int:
    """Blocks that the files in `folder` take, as `du` counts them."""
    return sum(512 * path.lstat().st_blocks for path in [folder, *folder.rglob("*")])


def show_disk(results: Results, packages: Path) -> None:
    """What the install takes, without pip and with it, and the largest parts."""
    sizes = {path.name: disk_bytes(path) / MB for path in packages.iterdir()}
    tools = sum(sizes.get(name, 0) for name in ("pip", "setuptools", "pkg_resources", "_distutils_hack"))
    whole = sum(sizes.values())
    largest = dict(sorted(sizes.items(), key=lambda item: -item[1])[:8])
    results.add(
        "base install on disk: {mb:.0f} MB; with pip and setuptools {with_tools_mb:.0f} MB; largest:\n  "
        + ", ".join(f"{name} {size:.0f}" for name, size in largest.items()),
        what="disk",
        mb=whole - tools,
        with_tools_mb=whole,
        largest_mb=largest,
    )


def show_import(results: Results, python: Path) -> None:
    """The time that importing takes in fresh interpreters, NumPy's alone beside it."""
    subprocess.run([str(python), "-c", WARM], check=True)
    for module in ("evener.autodiff", "numpy"):
        command = [str(python), "-c", TIMED.format(module)]
        done = (subprocess.run(command, capture_output=True, check=True) for _ in range(IMPORTS))
        seconds = spread(float(one.stdout) for one in done)
        text = "import {module}: {seconds:.3f} s in {interpreters} fresh interpreters"
        results.add(text, what="import", module=module, seconds=seconds, interpreters=IMPORTS)


@contextmanager
def started(python: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`evener WORDS` by that interpreter, with one thread; it has ended when the block is left."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [str(python), "-m", "evener", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **one}
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=20)


def watch(pid: int, seen: list[Memory], stop: threading.Event) -> None:
    """Note the memory of a process, again and again until `stop`."""
    process = psutil.Process(pid)
    while not stop.wait(0.1):
        info = process.memory_full_info()
        seen.append(Memory(info.rss, info.uss))


def worker_memory(python: Path, data: Path, epochs: int, *options: str) -> list[Memory]:
    """What a worker had over a run."""
    with tempfile.TemporaryDirectory(prefix="evener-") as folder:
        home = ("--home", f"{folder}/home")
        with started(Path(sys.executable), "up", *home, "--listen", "127.0.0.1:0", "--json") as master:
            assert master.stdout is not None
            said = json.loads(master.stdout.readline())
            words = (
                "join",
                said["address"],
                "--token",
                said["token"],
                "--data",
                str(data),
                "--cache",
                f"{folder}/cache",
            )
            with started(python, *words, *options) as node:
                seen: list[Memory] = []
                stop = threading.Event()
                watcher = threading.Thread(target=watch, args=(node.pid, seen, stop))
                watcher.start()
                train = ("train", "nfnn", "--data", str(data), "--agreement", "sync", "--epochs", str(epochs))
                with started(Path(sys.executable), *train, *home, "--output", f"{folder}/run", "--json") as run:
                    code = run.wait()
                stop.set()
                watcher.join()
                if code:
                    raise SystemExit(f"the run ended with exit code {code}")
                return seen


def show_memory(results: Results, name: str, seen: list[Memory], data_bytes: int) -> None:
    """What a worker had, besides its data."""
    most = max(seen)
    then = seen[seen.index(most) :]
    training = Memory(*(int(median(values)) for values in zip(*then, strict=True)))
    for when, (resident, own) in (("training", training), ("at most", most)):
        results.add(
            "{worker}, {when}: {resident_mb:.0f} MB resident, {resident_besides_mb:.0f} MB besides its data; "
            "its own (not shared) {own_mb:.0f} and {own_besides_mb:.0f} MB",
            what="memory",
            worker=name,
            when=when,
            resident_mb=resident / MB,
            resident_besides_mb=(resident - data_bytes) / MB,
            own_mb=own / MB,
            own_besides_mb=(own - data_bytes) / MB,
        )


def main() -> None:
    """All figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST")
    parser.add_argument("--epochs", type=int, default=6)
    words = parser.parse_args()
    with open_results(words) as results, tempfile.TemporaryDirectory(prefix="evener-") as folder:
        task = load_thin_task("nfnn", words.data)
        assert task.validation_data is not None
        data_bytes = sum(array.nbytes for array in (*task.train_data(), *task.validation_data()))
        results.add("data of a worker: {mb:.0f} MB", what="data", mb=data_bytes / MB)
        environment = Path(folder) / "base"
        python = make_environment(environment)
        show_import(results, python)
        show_disk(results, packages_of(environment))
        data, epochs = words.data.resolve(), words.epochs
        show_memory(results, "thin worker", worker_memory(python, data, epochs, "--thin"), data_bytes)
        show_memory(results, "PyTorch worker", worker_memory(Path(sys.executable), data, epochs), data_bytes)


if __name__ == "__main__":
    main()
