"""Usable memory: limits of control groups, read from trees of files like the kernel's, and who goes by them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evener.benchmark.dry_run import capacity, dry_run_of
from evener.benchmark.numpy_device import profile_numpy
from evener.parallel.pipeline.pipeline import Pipeline
from evener.records.errors import DoesNotFit, InvalidValue
from evener.system import control_groups
from evener.system import memory as memory_module
from evener.system.memory import Memory, is_out_of_memory, memory_limits, usable_memory
from support.refusals import refused

CPU = torch.device("cpu")
TREES = {
    "version 1": (
        {"memory/job/memory.limit_in_bytes": "3000000\n", "memory/job/memory.usage_in_bytes": "2000000\n"},
        "4:memory:/job\n0::/job\n",
    ),
    "version 2": ({"job/memory.max": "3000000\n", "job/memory.current": "2000000\n"}, "0::/job\n"),
}


class Groups:
    """A tree of control groups, in place of the machine's.

    Args:
        root: folder for it.
        monkeypatch: that puts it there.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._monkeypatch = root, monkeypatch

    def hold(self, files: dict[str, str], membership: str) -> None:
        """From now on the kernel has these `files`, and says of this process `membership`."""
        for name, text in {**files, "membership": membership}.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)
        self._monkeypatch.setattr(control_groups, "_ROOT", self.root)
        self._monkeypatch.setattr(control_groups, "_MEMBERSHIP", self.root / "membership")


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has this process keep so many bytes that it freed; none until it is called."""

    def keep(nbytes: int) -> None:
        monkeypatch.setattr(memory_module, "kept_bytes", lambda: nbytes)

    keep(0)
    return keep


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    """A tree of control groups that can be filled."""
    return Groups(tmp_path, monkeypatch)


def test_cgroup_v2_counts_parents_and_inactive_files(groups: Groups) -> None:
    files = {
        "memory.max": "max\n",
        "slurm/memory.max": "4000\n",
        "slurm/memory.current": "1000\n",
        "slurm/memory.stat": "anon 700\ninactive_file 300\n",
        "slurm/job/memory.max": "3000\n",
        "slurm/job/memory.current": "2500\n",
    }
    groups.hold(files, "0::/slurm/job\n")
    assert memory_limits() == [Memory(3000, 500), Memory(4000, 3300)]


def test_cgroup_v1_ignores_the_unlimited_value(groups: Groups) -> None:
    files = {
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/docker/x/memory.limit_in_bytes": "2000\n",
        "memory/docker/x/memory.usage_in_bytes": "1500\n",
        "memory/docker/x/memory.stat": "inactive_file 1\ntotal_inactive_file 100\n",
    }
    membership = "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/docker/x\n"
    groups.hold(files, membership)
    assert memory_limits() == [Memory(2000, 600)]


def test_container_with_only_the_top_group_finds_its_limit(groups: Groups) -> None:
    files = {"memory.max": "5000\n", "memory.current": "1000\n"}
    groups.hold(files, "0::/kubepods/pod7/box\n")
    assert memory_limits() == [Memory(5000, 4000)]


def test_group_over_its_limit_has_no_free_memory(groups: Groups) -> None:
    files = {"memory.max": "5000\n", "memory.current": "6000\n"}
    groups.hold(files, "0::/\n")
    assert memory_limits() == [Memory(5000, 0)]


@pytest.mark.parametrize("membership", ["", "garbage\n", "0::/gone\n"])
def test_no_control_groups_mean_no_limits(groups: Groups, membership: str) -> None:
    groups.hold({}, membership)
    assert memory_limits() == []
    (groups.root / "membership").unlink()
    assert memory_limits() == []


def test_usable_memory_is_within_the_total() -> None:
    total, usable = usable_memory()
    assert 1 <= usable <= total <= psutil.virtual_memory().total


def test_user_limit_bounds_usable_but_not_total_memory() -> None:
    total, usable = usable_memory("cpu", 1 << 20)
    assert usable == 1 << 20
    assert total == usable_memory()[0]


def test_tightest_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [Memory(5 << 20, 4 << 20), Memory(6 << 20, 2 << 20)]
    monkeypatch.setattr(memory_module, "memory_limits", lambda: limits)
    assert usable_memory() == (5 << 20, 2 << 20)


def test_freed_but_retained_memory_is_usable(kept: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "memory_limits", lambda: [Memory(5 << 20, 2 << 20)])
    kept(1 << 20)
    assert usable_memory() == (5 << 20, 3 << 20)
    kept(8 << 20)
    assert usable_memory() == (5 << 20, 5 << 20)


def test_full_control_group_leaves_one_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "memory_limits", lambda: [Memory(1 << 20, 0)])
    assert usable_memory() == (1 << 20, 1)


def test_limit_of_zero_is_rejected() -> None:
    with refused(InvalidValue):
        usable_memory("cpu", 0)


@pytest.mark.parametrize("version", TREES)
def test_numpy_profile_follows_the_control_group(groups: Groups, version: str) -> None:
    groups.hold(*TREES[version])
    profile = profile_numpy("thin", 1.0, seconds=0.01)
    assert (profile.memory_bytes, profile.usable_memory_bytes) == (3_000_000, 1_000_000)


@pytest.mark.parametrize("version", TREES)
def test_largest_batch_follows_the_control_group(groups: Groups, version: str) -> None:
    def fitting() -> int | None:
        with dry_run_of(
            nn.Linear(1000, 1),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            lambda model, batch: model(batch).square().sum(),
            lambda samples: torch.ones(samples, 1000),
            CPU,
        ) as trial:
            return capacity(trial, 1000, usable_memory()[1])

    assert fitting() is None  # all fit
    groups.hold(*TREES[version])
    found = fitting()
    assert found is not None
    assert 10 < found < 300  # of 4 kB each, in 90 % of 1 MB


@pytest.mark.parametrize("version", TREES)
def test_pipeline_stages_follow_the_control_group(groups: Groups, version: str) -> None:
    def build() -> Pipeline:
        x = torch.randn(8, 1000)
        return Pipeline(nn.Linear(1000, 1000), x, F.mse_loss, on=[CPU], costs="estimated", micro_batches=1)

    build()
    groups.hold(*TREES[version])
    with pytest.raises(DoesNotFit):
        build()


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_errors_of_libraries_are_recognized(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) == is_memory
