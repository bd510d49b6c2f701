"""The rate of a node without PyTorch."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from evener.benchmark.numpy_device import profile_numpy, profile_numpy_apart
from evener.records.errors import TrainingFailed

MULTIPLIES = "import numpy as np\na = np.ones((256, 256))\nprint(flush=True)\nwhile True: a @ a"


def rates(seconds: float = 0.4) -> list[float]:
    """Return the measured rates, in GFLOP/s."""
    profile = profile_numpy("ada", 1.0, seconds)
    return [one.matmul_flops / 1e9 for one in profile.throughputs if one.matmul_flops is not None]


def test_rate_hardly_depends_on_other_processes() -> None:
    idle = np.max([rates() for _ in range(3)], axis=0)
    with ExitStack() as stack:
        for _ in range(2):
            other = stack.enter_context(subprocess.Popen([sys.executable, "-c", MULTIPLIES], stdout=subprocess.PIPE))
            stack.callback(other.kill)
            assert other.stdout is not None
            other.stdout.readline()
        busy = np.min([rates() for _ in range(5)], axis=0)
    assert (busy > idle / 3).all()


def test_rate_is_that_of_the_threads_in_use() -> None:
    two = rates()
    before = [library["num_threads"] for library in threadpool_info()]
    with threadpool_limits(1):
        one = rates()
    assert [library["num_threads"] for library in threadpool_info()] == before
    if max(before) == 2:
        assert all(1.3 < both / single < 3 for both, single in zip(two, one, strict=True))


def test_process_of_its_own_measures_the_same() -> None:
    profile, spent = profile_numpy_apart("ada", 0.5, 0.4)
    here = profile_numpy("ada", 0.5, 0.4)
    assert (profile.node, profile.speed, profile.cores) == ("ada", 0.5, here.cores)
    for apart, own in zip(profile.throughputs, here.throughputs, strict=True):
        assert (apart.matmul_flops is None) == (own.matmul_flops is None)
        assert not own.matmul_flops or 1 / 3 < (apart.matmul_flops or 0.0) / own.matmul_flops < 3
    assert spent.node == "ada"


def test_measuring_process_without_a_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.benchmark.numpy_device._CHILD", "raise MemoryError('no memory is left')")
    with pytest.raises(TrainingFailed, match="MemoryError: no memory is left"):
        profile_numpy_apart("ada", 1.0, 0.1)
