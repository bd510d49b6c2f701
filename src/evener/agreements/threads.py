"""Passes over long arrays, block by block so that a block stays in the cache, on all cores at once.

NumPy releases the interpreter while it computes, but needs it before and after. So blocks are as large as the
second-level cache allows: with small ones the threads mostly wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from evener.agreements.layout import Floats
from evener.system.cores import usable_cores

BLOCK_BYTES = 1 << 19
"""Bytes of one array in one block."""

Task = Callable[[int, int, int], None]
"""Receives the number of its thread, from 0, and the elements [start, stop) to process."""


class ThreadPool:
    """Threads for passes over arrays, one pass at a time; close it, or use it in a `with`.

    Args:
        threads: number of threads; by default the number of usable cores.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or usable_cores()
        self._pool = ThreadPoolExecutor(self.threads - 1, "evener-cores") if self.threads > 1 else None
        self._scratch: dict[tuple[int, int], NDArray[np.uint8]] = {}

    def each(self, start: int, stop: int, itemsize: int, task: Task) -> None:
        """Process every element of [start, stop) once, by calls of `task` for at most a block; overflow does not raise.

        Args:
            start: first element.
            stop: after the last element.
            itemsize: bytes of an element.
            task: work on a block; its error ends the pass and is raised here.
        """
        block = BLOCK_BYTES // itemsize
        blocks = -(-(stop - start) // block)
        if self._pool is None or blocks < 2 * self.threads:
            _run(0, start, stop, block, task)
            return
        cuts = [start + blocks * i // self.threads * block for i in range(self.threads)] + [stop]
        others = [
            self._pool.submit(_run, thread, cuts[thread], cuts[thread + 1], block, task)
            for thread in range(1, self.threads)
        ]
        try:
            _run(0, cuts[0], cuts[1], block, task)
        finally:
            for other in others:
                other.result()

    def scratch(self, thread: int, index: int, like: Floats) -> Floats:
        """Return a thread's own memory for a block such as `like`; the same memory for the same index."""
        memory = self._scratch.get((thread, index))
        if memory is None:
            memory = self._scratch[thread, index] = np.empty(BLOCK_BYTES, np.uint8)
        return memory[: like.nbytes].view(like.dtype)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _run(thread: int, start: int, stop: int, block: int, task: Task) -> None:
    with np.errstate(all="ignore"):  # finiteness is checked, not warned about
        for first in range(start, stop, block):
            task(thread, first, min(first + block, stop))
