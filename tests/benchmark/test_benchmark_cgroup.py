"""Memory limits of control groups, read from trees of files like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.benchmark.cgroup import MemoryLimit, memory_limits


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def limits(root: Path, membership: str) -> list[MemoryLimit]:
    file = root / "membership"
    file.write_text(membership)
    return memory_limits(root, file)


def test_version_2_counts_the_own_group_and_those_above_and_droppable_files_as_free(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "memory.max": "max\n",
            "slurm/memory.max": "4000\n",
            "slurm/memory.current": "1000\n",
            "slurm/memory.stat": "anon 700\ninactive_file 300\n",
            "slurm/job/memory.max": "3000\n",
            "slurm/job/memory.current": "2500\n",
        },
    )
    assert limits(root, "0::/slurm/job\n") == [MemoryLimit(3000, 500), MemoryLimit(4000, 3300)]


def test_version_1_ignores_the_number_that_stands_for_no_limit(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/docker/x/memory.limit_in_bytes": "2000\n",
            "memory/docker/x/memory.usage_in_bytes": "1500\n",
            "memory/docker/x/memory.stat": "inactive_file 1\ntotal_inactive_file 100\n",
        },
    )
    membership = "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/docker/x\n"
    assert limits(root, membership) == [MemoryLimit(2000, 600)]


def test_a_container_that_sees_only_the_top_group_still_finds_its_limit(tmp_path: Path) -> None:
    root = tree(tmp_path, {"memory.max": "5000\n", "memory.current": "1000\n"})
    assert limits(root, "0::/kubepods/pod7/box\n") == [MemoryLimit(5000, 4000)]


def test_a_group_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    root = tree(tmp_path, {"memory.max": "5000\n", "memory.current": "6000\n"})
    assert limits(root, "0::/\n") == [MemoryLimit(5000, 0)]


@pytest.mark.parametrize("membership", ["", "garbage\n", "0::/gone\n"])
def test_no_control_groups_mean_no_limits(tmp_path: Path, membership: str) -> None:
    assert limits(tmp_path, membership) == []
    assert memory_limits(tmp_path, tmp_path / "no such file") == []
