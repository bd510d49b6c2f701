"""Data are read early only if samples load alike from files that come when they are opened."""

from __future__ import annotations

import os
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import evener.data.loader
import evener.data.tasks.load
import evener.records.task  # noqa: F401  # loaded here, PyTorch with them, since every trial is a fork of this process
from evener.data import early_data
from evener.data.early_data import EarlyTrial

START = """
import ctypes, os, random, time
from pathlib import Path
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from evener import BatchTask, Task

class Files(Dataset):
    def __init__(self, folder):
        self.folder, self.files = folder, sorted(folder.glob("*.npy"))
    def __len__(self):
        return len(self.files)
    def __getitem__(self, i):
        return torch.from_numpy(np.load(self.files[i])), i % 2

def task(data_dir, **words):
    made = dict(
        name="t", model=lambda: nn.Linear(4, 2), loss=nn.functional.cross_entropy,
        train_data=lambda: DATA(data_dir), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=4,
    )
    return Task(**made | words)

DATA = Files
"""
ALIKE = {
    "files": "",
    "validation": "def task(data_dir, make=task): return make(data_dir, validation_data=lambda: DATA(data_dir))",
    "lengths": """
        class Sizes(Files):
            def __getitem__(self, i):
                return torch.tensor([float(os.path.getsize(self.files[i])), np.load(self.files[i])[0]]), 0
        DATA = Sizes
    """,
    "random": """
        class Drawn(Files):
            def __getitem__(self, i):
                return torch.from_numpy(np.load(self.files[i])) + torch.rand(4) + random.random(), 0
        DATA = Drawn
    """,
    "memory maps": """
        class Maps(Files):
            def __getitem__(self, i):
                return torch.from_numpy(np.load(self.files[i], mmap_mode="r").copy()), 0
        DATA = Maps
    """,
    "two requests for a file": """
        from threading import Event
        class Twice(Files):
            def __getitem__(self, i):
                sample, wanted = super().__getitem__(i), Path(f"{self.folder}.wanted")
                if wanted.exists():
                    with wanted.open("a") as file:
                        file.write(f"{self.files[i].name}\\n")
                    Event().wait(0.01)
                return sample
        DATA = Twice
    """,
    "dict": """
        class Dicts(Files):
            def __getitem__(self, i):
                return {"x": super().__getitem__(i)[0], "words": ["a", i]}, 0
        DATA = Dicts
    """,
}
DIFFERENT = {
    "code in C": """
        libc = ctypes.CDLL(None)
        class Raw(Files):
            def __getitem__(self, i):
                file = libc.open(str(self.files[i]).encode(), 0)
                buffer = ctypes.create_string_buffer(200)
                count = libc.read(file, buffer, 200)
                libc.close(file)
                return torch.tensor(list(buffer.raw[:count]), dtype=torch.float32), 0
        DATA = Raw
    """,
    "names of files": """
        class Named(Files):
            def __getitem__(self, i):
                return super().__getitem__(i)[0], str(self.files[i])
        DATA = Named
    """,
    "all at the start": """
        class Whole(Files):
            def __init__(self, folder):
                super().__init__(folder)
                self.all = [np.load(file) for file in self.files]
        DATA = Whole
    """,
    "batches in C": """
        libc = ctypes.CDLL(None)
        class Batches(Files):
            def __getitem__(self, i):
                return i
            def collate_fn(self, samples):
                rows = []
                for i in samples:
                    file = libc.open(str(self.files[i]).encode(), 0)
                    buffer = ctypes.create_string_buffer(200)
                    libc.read(file, buffer, 200)
                    libc.close(file)
                    rows.append(list(buffer.raw))
                return torch.tensor(rows, dtype=torch.float32), torch.zeros(len(rows), dtype=torch.int64)
        DATA = Batches
    """,
    "later epochs in C": """
        libc = ctypes.CDLL(None)
        class Later(Files):
            epoch = 0
            def set_epoch(self, epoch):
                self.epoch = epoch
            def __getitem__(self, i):
                if not self.epoch:
                    return super().__getitem__(i)
                file = libc.open(str(self.files[-1 - i]).encode(), 0)
                buffer = ctypes.create_string_buffer(200)
                libc.read(file, buffer, 200)
                libc.close(file)
                return torch.tensor(list(buffer.raw), dtype=torch.float32), 0
        DATA = Later
    """,
    "a model in C": """
        def model(data_dir):
            made = nn.Linear(4, 2)
            words = torch.from_file(str(data_dir / "00.npy"), size=8, dtype=torch.uint8)
            made.weight.data.fill_(float(words.sum()))
            return made
        def task(data_dir, make=task): return make(data_dir, model=lambda: model(data_dir))
    """,
    "another suffix": """
        class Two(Files):
            def __len__(self):
                return 10000
            def __getitem__(self, i):
                if i == 5003:
                    return torch.from_file(str(self.folder / "rare.raw"), size=4, dtype=torch.float32).clone(), 0
                return super().__getitem__(i % 60)
        DATA = Two
    """,
    "an error": """
        class Failing(Files):
            def __getitem__(self, i):
                raise ValueError("no")
        DATA = Failing
    """,
    "the end of the process": """
        class Ending(Files):
            def __getitem__(self, i):
                os._exit(0)
        DATA = Ending
    """,
    "no time": """
        class Slow(Files):
            def __getitem__(self, i):
                time.sleep(1000)
        DATA = Slow
    """,
    "batches": """
        def task(data_dir):
            return BatchTask(name="b", model=None, train_loader=None, step=None, optimizer=None)
    """,
    "only validation in C": """
        libc = ctypes.CDLL(None)
        class Raw(Files):
            def __getitem__(self, i):
                file = libc.open(str(self.files[i]).encode(), 0)
                buffer = ctypes.create_string_buffer(200)
                libc.read(file, buffer, 200)
                return torch.tensor(list(buffer.raw), dtype=torch.float32), 0
        def task(data_dir, make=task): return make(data_dir, validation_data=lambda: Raw(data_dir))
    """,
}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "data").mkdir()
    for number in range(60):
        np.save(tmp_path / "data" / f"{number:02}.npy", np.full(4, number, np.float32))
    return sorted(file.name for file in (tmp_path / "data").iterdir())


def trial(tmp_path: Path, files: list[str], code: str, monkeypatch: pytest.MonkeyPatch, least: int = 1) -> bool:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(early_data, "_SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(early_data, "EARLY_BYTES", least)
    if "sleep" in code:
        monkeypatch.setattr(early_data, "_SECONDS", 1.0)
    (tmp_path / "task.py").write_text(START + dedent(code))
    if "rare.raw" in code:
        (tmp_path / "data" / "rare.raw").write_bytes(b"x" * 16)
        files = [*files, "rare.raw"]
    one = EarlyTrial(str(tmp_path / "task.py"), tmp_path / "data", files, {})
    try:
        return one.succeeds()
    finally:
        one.close()


QUICK = (
    "files",
    "validation",
    "random",
    "two requests for a file",
    "code in C",
    "batches in C",
    "another suffix",
    "all at the start",
)


def cases(codes: dict[str, str]) -> list[Any]:
    """Those of `QUICK` in every run of the tests."""
    slow = pytest.mark.slow
    return [pytest.param(code, id=name, marks=[] if name in QUICK else slow) for name, code in codes.items()]


class Owner:
    """An object in a circle that ends a process other than its own when it is collected, as a lost thread does."""

    def __init__(self) -> None:
        self.itself, self.pid = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            os._exit(7)


def test_trial_leaves_garbage_to_its_parent(tmp_path: Path, files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Owner()
    assert trial(tmp_path, files, "import gc; gc.collect()", monkeypatch)


@pytest.mark.parametrize("code", cases(ALIKE))
def test_files_that_python_opens_are_read_early(
    code: str, tmp_path: Path, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trial(tmp_path, files, code, monkeypatch)
    assert sorted(file.name for file in (tmp_path / "data").iterdir()) == files


@pytest.mark.parametrize("code", cases(DIFFERENT))
def test_other_data_come_first(code: str, tmp_path: Path, files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not trial(tmp_path, files, code, monkeypatch)
    assert not list((tmp_path / "shm").iterdir())


def test_trial_that_is_stuck_is_left(tmp_path: Path, files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_data, "_STUCK_SECONDS", 2.0)
    start = time.monotonic()
    assert not trial(
        tmp_path, files, "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()", monkeypatch
    )
    assert time.monotonic() - start < 20


def test_few_data_come_first(tmp_path: Path, files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not trial(tmp_path, files, "", monkeypatch, least=2**25)
