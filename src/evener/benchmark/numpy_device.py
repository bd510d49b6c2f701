"""Measures a node without PyTorch: the rate of NumPy's matrix products, as a device profile."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
from numpy.typing import DTypeLike

from evener.benchmark.processor_time import ProcessorTime, ProcessorWatch
from evener.records.decoding import decode_json
from evener.records.errors import TrainingFailed
from evener.records.profile import PRECISIONS, DeviceProfile, Precision, Throughput
from evener.records.schema import shown
from evener.system.cores import keep_to_quota, undivided_products, usable_cores
from evener.system.host import cpu_model
from evener.system.memory import usable_memory

_NO_TORCH = "measured without PyTorch"
_SIZES = (128, 256, 512)
_DTYPES: dict[Precision, DTypeLike] = {"fp64": np.float64, "fp32": np.float32}


def profile_numpy(node: str, speed: float, seconds: float = 2.0) -> DeviceProfile:
    """Return the profile of this machine's CPU: the best rate of matrix products in float64 and float32.

    Args:
        node: name of the node.
        speed: 1, or the fraction to which the node is slowed down.
        seconds: approximate duration of all measurements.
    """
    total, usable = usable_memory()
    share = seconds / len(_DTYPES)
    return DeviceProfile(
        node=node,
        device="cpu",
        model=cpu_model(),
        cores=usable_cores(),
        memory_bytes=total,
        usable_memory_bytes=usable,
        throughputs=tuple(_throughput(precision, speed, share) for precision in PRECISIONS),
        speed=speed,
    )


def profile_numpy_apart(node: str, speed: float, seconds: float) -> tuple[DeviceProfile, ProcessorTime]:
    """Return `profile_numpy` of a process of its own, and that process's time; this one keeps the memory.

    NumPy's library holds a few MB for each thread that has multiplied, as long as the process lives.

    Raises:
        TrainingFailed: the process ends without a result.
    """
    arguments = msgspec.json.encode((sys.path, node, speed, seconds)).decode()
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, arguments], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if child.returncode:
        last = child.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise TrainingFailed(f"the processor could not be measured: {shown(''.join(last))}")
    return decode_json(child.stdout, tuple[DeviceProfile, ProcessorTime])


_CHILD = """
import json, sys
sys.path, *arguments = json.loads(sys.argv[1])
from evener.benchmark.numpy_device import print_profile
print_profile(*arguments)
"""


def print_profile(node: str, speed: float, seconds: float) -> None:
    """Print the result of `profile_numpy_apart`, in the process that it starts."""
    keep_to_quota()
    watch = ProcessorWatch(node)
    profile = profile_numpy(node, speed, seconds)
    sys.stdout.write(msgspec.json.encode((profile, watch.stop())).decode())


def _throughput(precision: Precision, speed: float, seconds: float) -> Throughput:
    if precision not in _DTYPES:
        return Throughput(precision=precision, reason=_NO_TORCH)
    rate = max(_rate(n, _DTYPES[precision], seconds / len(_SIZES)) for n in _SIZES)
    return Throughput(precision=precision, matmul_flops=rate * speed, reason=f"convolution: {_NO_TORCH}")


def _rate(n: int, dtype: DTypeLike, seconds: float) -> float:
    """Return the FLOP/s of products of two n x n matrices: the sum over the threads that NumPy uses.

    Each thread computes products of its own for about `seconds`, and its fastest one counts. Threads that share a
    product wait for each other; on a busy machine even the fastest product then takes up to 15 times as long.
    """
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal((n, n)).astype(dtype) for _ in range(2))
    until = time.perf_counter() + seconds

    def shortest() -> float:
        out: Any = np.empty((n, n), dtype)
        best = float("inf")
        while True:
            before = time.perf_counter()
            np.matmul(a, b, out=out)
            best = min(best, time.perf_counter() - before)
            if time.perf_counter() > until:
                return best

    with undivided_products() as size, ThreadPoolExecutor(size) as pool:
        bests = [future.result() for future in [pool.submit(shortest) for _ in range(size)]]
    return sum(2.0 * n**3 / best for best in bests)
