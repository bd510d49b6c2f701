"""What becomes of a process that loads data when it fails, finds no shared memory, dies, or loses its rank."""

from __future__ import annotations

import gc
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from evener.data import loading_process
from evener.data.loader import open_batches
from evener.data.loading_process import loading_death
from evener.data.sampler import Division, ShuffledSampler
from evener.oracle.apportion import weights_to_workers
from evener.records.errors import DoesNotFit, InvalidInput, TrainingFailed
from evener.system.memory import is_out_of_memory
from support.commands import command
from support.refusals import refused

LIMIT = 30.0
SAMPLES = TensorDataset(torch.ones(40, 10_000), torch.ones(40))


class Failing(Dataset[Any]):
    """Fails in a loading process at its third sample."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if self._error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        elif index == 3:
            raise self._error
        return torch.ones(3), 1


def batches(dataset: Dataset[Any]) -> Iterator[Any]:
    alone = Division(weights_to_workers([1.0], [None]))
    sampler = ShuffledSampler(count=40, batch_size=4, accumulate=1, seed=0, rank=0, division=alone)
    return open_batches(dataset, sampler, first=1, last=10, seed=0, workers=2)


@contextmanager
def little_shared_memory() -> Iterator[None]:
    """Inside, files may have 1000 bytes, those in shared memory, too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


FULL = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


def test_full_main_memory_is_no_failure_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_process, "get_worker_info", object)
    with pytest.raises(RuntimeError) as raised:
        loading_process.load_in_process(lambda: Failing(FULL)[3], explains=True)
    assert raised.value is FULL


@pytest.mark.slow
def test_full_main_memory_of_a_process_is_no_failure_of_the_task() -> None:
    with pytest.raises(RuntimeError) as raised:
        list(batches(Failing(FULL)))
    is_full = is_out_of_memory(raised.value)
    del raised
    gc.collect()  # its traceback holds the loader, with whose end the processes end
    assert is_full


class Wide(Dataset[Any]):
    """Samples that are stacked in the loading process, which takes shared memory for it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.ones(10_000), 1


@pytest.mark.parametrize("dataset", [SAMPLES, Wide()], ids=["tensors", "samples"])
def test_small_shared_memory_is_reported_to_the_rank(dataset: Dataset[Any]) -> None:
    with pytest.raises(DoesNotFit, match=r"--workers 0.*--shm-size"), little_shared_memory():
        next(batches(dataset))


TASK = """
import torch
from torch import nn
from torch.utils.data import Dataset
from evener import Task

class Wide(Dataset):
    def __len__(self): return 400
    def __getitem__(self, index): return torch.ones(20_000), index % 2

task = Task(model=lambda: nn.Linear(20_000, 2), loss=nn.functional.cross_entropy, train_data=Wide, batch_size=20)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "nodes", [(), ("--local-nodes", "1,1", "--shares", "1,1")], ids=["this process", "local nodes"]
)
def test_command_with_small_shared_memory_names_the_remedy(nodes: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(TASK)
    words = shlex.join(command("train", "wide.py", "--workers", "2", "--output", "run", *nodes))
    mount = "mount -t tmpfs -o size=512k tmpfs /dev/shm"
    if os.geteuid() or subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False).returncode:
        pytest.skip("a small /dev/shm needs the right to mount one")
    run = ["unshare", "-m", "sh", "-c", f"{mount} && exec {words}"]
    ended = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == DoesNotFit.exit_code, ended.stderr
    told = [line for line in ended.stderr.splitlines() if line.startswith("evener: ")]
    assert len(told) == 1
    assert "--workers 0" in told[0]
    assert "--shm-size" in told[0]


def test_evener_error_preserves_its_class() -> None:
    with refused(InvalidInput):
        list(batches(Failing(InvalidInput("no such picture"))))


def test_dataset_error_names_its_line() -> None:
    with refused(TrainingFailed):
        list(batches(Failing(ValueError("a bad picture"))))


def test_dead_loading_process_is_reported_with_likely_causes() -> None:
    with pytest.raises(RuntimeError) as raised:
        list(batches(Failing(None)))
    death = loading_death(raised.value)
    assert isinstance(death, TrainingFailed)
    assert loading_death(RuntimeError("shapes differ")) is None


RANK = """
import os, sys, time
from test_loading_process import SAMPLES, Endless, batches
loaded = batches(Endless() if sys.argv[1] == "busy" else SAMPLES)
next(loaded)
print("loading", flush=True)
time.sleep(60)
"""


class Endless(Dataset[Any]):
    """Its first sample takes longer than anybody waits: a process that loads it does not look for its parent."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        os.write(1, b"loading\n")
        time.sleep(600)


@pytest.mark.parametrize("work", ["idle", pytest.param("busy", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_loading_processes_end_when_their_rank_is_killed(method: str, work: str) -> None:
    start = f"import multiprocessing; multiprocessing.set_start_method({method!r})\n"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", start + RANK, work]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as rank:
        assert rank.stdout is not None
        for _ in range(2 if work == "busy" else 1):
            assert rank.stdout.readline() == "loading\n"
        others = psutil.Process(rank.pid).children(recursive=True)
        rank.kill()
    assert len(others) >= 2
    _, left = psutil.wait_procs(others, LIMIT)
    for one in left:
        one.kill()
    assert left == []
