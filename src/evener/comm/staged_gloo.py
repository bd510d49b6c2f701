"""Gloo for tensors of accelerators, which pass through main memory.

One thread per group starts the operations in the order of their calls: it waits until the device has computed the
tensors, copies them to main memory, and calls Gloo. The thread that waits for an operation copies its results to the
device. So the caller never waits for the device, and copies overlap with computation. An operation can be abandoned
like one between processors (`abortable`); a collective of NCCL cannot. Copies use streams of their own and pinned
memory where the device has them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from evener.system import accelerators

BACKEND = "staged"
"""Name of process groups of PyTorch that stage tensors."""


class StagedGloo:
    """A process group of Gloo whose tensors may be on accelerators.

    Args:
        gloo: the group, used by this object only.
    """

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_follow, args=(self._calls,), name="evener-staging", daemon=True).start()
        self._close = weakref.finalize(self, self._calls.put, None)

    def allreduce(self, tensors: list[Tensor], *options: Any) -> StagedWork:
        """Start to sum tensors over all ranks, in place."""
        return self._begin(lambda on: self._gloo.allreduce(on(tensors), *options), reads=tensors, writes=tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> StagedWork:
        """Start to copy one rank's tensors to all, in place."""
        is_root = options.rootRank == self._gloo.rank()
        reads, writes = (tensors, ()) if is_root else ((), tensors)
        return self._begin(lambda on: self._gloo.broadcast(on(tensors), options), reads=reads, writes=writes)

    def allgather(self, gathered: list[list[Tensor]], tensors: list[Tensor], *options: Any) -> StagedWork:
        """Start to copy every rank's tensors to all."""
        return self._begin(
            lambda on: self._gloo.allgather([on(row) for row in gathered], on(tensors), *options),
            reads=tensors,
            writes=list(chain.from_iterable(gathered)),
        )

    def alltoall_base(self, target: Tensor, source: Tensor, *sizes_and_options: Any) -> StagedWork:
        """Start to exchange blocks with every peer."""
        return self._begin(
            lambda on: self._gloo.alltoall_base(*on([target]), *on([source]), *sizes_and_options),
            reads=[source],
            writes=[target],
        )

    def send(self, tensors: list[Tensor], to: int, tag: int) -> StagedWork:
        """Start to send a message to one peer."""
        return self._begin(lambda on: self._gloo.send(on(tensors), to, tag), reads=tensors, writes=())

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> StagedWork:
        """Start to receive a message from one peer."""
        return self._begin(lambda on: self._gloo.recv(on(tensors), sender, tag), reads=(), writes=tensors)

    @property
    def inner(self) -> Any:
        """The group of Gloo."""
        return self._gloo

    def close(self) -> None:
        """End the thread, after the operations that were begun."""
        self._close()

    def _begin(self, start: Start, *, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> StagedWork:
        work = StagedWork(start, reads, writes)
        self._calls.put(work.begin)
        return work


Start = Callable[[Callable[[list[Tensor]], list[Tensor]]], Any]
"""Starts an operation with the tensors in main memory that a function returns for those of the caller."""


class StagedWork:
    """An operation under way.

    Its threads copy in the caller's mode, since PyTorch changes a tensor of its inference mode in that mode only.

    Args:
        start: starts the operation.
        reads: tensors that it sends.
        writes: tensors that it receives.
    """

    def __init__(self, start: Start, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        self._start, self._reads, self._writes = start, reads, writes
        self._mode: Callable[[], AbstractContextManager[Any]] = (
            torch.inference_mode if torch.is_inference_mode_enabled() else nullcontext
        )
        self._begun: Future[Any] = Future()
        self._hosts: dict[int, Tensor] = {}
        devices = {tensor.device for tensor in (*reads, *writes) if accelerators.is_accelerator(tensor.device)}
        self._copier = _Copier(*devices) if devices else None  # of one device, as a rank has one

    def begin(self) -> None:
        """Copy what is sent to main memory, and start the operation; only the group's thread calls this."""
        try:
            with self._mode():
                if self._copier is not None:
                    self._hosts = self._copier.buffers([*self._reads, *self._writes])
                    self._copier.copy([(one, self._hosts[id(one)]) for one in self._reads])
                self._begun.set_result(self._start(lambda tensors: [self._hosts.get(id(one), one) for one in tensors]))
        except Exception as error:  # it is the caller's, who waits in another thread
            self._begun.set_exception(error)

    def wait(self) -> bool:
        """Return when the results are on the device. Raises the error of the operation."""
        self._begun.result().wait()
        if self._copier is not None:
            with self._mode():
                self._copier.copy([(self._hosts[id(one)], one) for one in self._writes])
        self._hosts = {}
        return True


class _Copier:
    """Copies of one operation between main memory and `device`, after the work that is queued there now."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_pinned = device, accelerators.capabilities(device).has_pinned_memory
        self._queued = accelerators.marked(device, timed=False)

    def buffers(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return dense tensors in main memory of the same shapes for those on the device, by id."""
        return {
            id(one): torch.empty(one.shape, dtype=one.dtype, pin_memory=self._is_pinned)
            for one in tensors
            if accelerators.is_accelerator(one.device)
        }

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy the first tensor of each pair into the second, and wait for it."""
        assert self._queued is not None
        if not pairs:
            return
        if not self._is_pinned:
            self._queued.synchronize()
            for source, target in pairs:
                target.copy_(source)
            accelerators.synchronize(self._device)
            return
        accelerators.use(self._device)
        with torch.Stream(self._device) as stream:
            stream.wait_event(self._queued)
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            done = accelerators.marked(self._device, timed=False)
        assert done is not None
        done.synchronize()


def _follow(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    """Make the calls, in order."""
    while (call := calls.get()) is not None:
        call()
        del call  # it would be kept until the next one
