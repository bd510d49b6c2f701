"""All-reduces that another thread can end: a rank leaves one whose other ranks are gone, and computes on with others.

A collective of Gloo's cannot be left: to wait for it, to abort it or to destroy its group blocks as long as a silent
peer is silent. So nobody waits for it here, but for a future of our own, which its end or `abort` fulfils, whichever is
first. What was left may still be under way, and a peer that wakes up writes into its tensors: these, and the group, are
kept until it ends.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

Sum = torch.futures.Future[Any]


class AbortableSums:
    """Sums over the ranks of a process group, each of which may be given up.

    Args:
        gloo: process group of the ranks; nobody else uses it.

    Attributes:
        error: why there will be no further sum; None while all is well.
    """

    def __init__(self, gloo: Any) -> None:
        self.error: Exception | None = None
        self._gloo = gloo
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Sum, Tensor, Any]] = {}
        self._next = 0

    def all_reduce(self, tensor: Tensor) -> Sum:
        """Start to sum `tensor` over the ranks, in place; the future holds it, or raises why there is no sum."""
        with self._lock:
            if self.error is not None:
                raise self.error
            assert self._gloo is not None
            work = self._gloo.allreduce([tensor])
            key, self._next = self._next, self._next + 1
            found: Sum = torch.futures.Future()
            self._open[key] = (found, tensor, work)
        work.get_future().then(lambda done: self._end(key, done))
        return found

    def abort(self, error: Exception) -> None:
        """From now on whoever waits, or begins, raises `error`; from any thread."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            left = [found for found, _, _ in self._open.values()]
        for found in left:
            found.set_exception(error)

    def let_go(self) -> bool:
        """Whether nothing is under way after `abort`; the group is then let go, which does not block any more."""
        gloo = None
        with self._lock:
            if self._open:
                return False
            gloo, self._gloo = self._gloo, None
        del gloo  # without the lock, which a thread that it waits for may want
        return True

    def _end(self, key: int, done: torch.futures.Future[Any]) -> None:
        """A sum has ended, in a thread of Gloo's; one that failed is the end of all."""
        with self._lock:
            found, tensor, _ = self._open.pop(key)
            if self.error is not None:
                return
        try:
            done.value()
        except RuntimeError as error:
            self.abort(error)  # first: whoever waits for this one asks why when it wakes up
            found.set_exception(error)
        else:
            found.set_result(tensor)
