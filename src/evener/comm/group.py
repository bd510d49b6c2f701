"""The ranks of one run: their names, process groups, and a count of all bytes sent.

Large tensors travel in `process_group` (NCCL between GPUs, Gloo otherwise); control messages, and small tensors of
CPUs, travel in a `mesh` of sockets. Messages are plain bytes: nothing here is unpickled.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from evener.comm.abortable import AbortableGloo
from evener.comm.abortable_group import AbortableProcessGroup, forget_in_torch
from evener.comm.mesh import Mesh
from evener.comm.message_topics import out_of_step
from evener.comm.signed_store import SignedStore
from evener.comm.step_timing import StepTimer
from evener.comm.traffic import Traffic
from evener.comm.uneven_all_reduce import UnevenAllReduce
from evener.oracle.all_reduce_shares import shares_among
from evener.system.accelerators import is_accelerator, model_and_units

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in PyTorch 2.13
_WITH_OWNERS = ("gradients", "measuring")
"""Kinds of sums whose elements may have owners."""


@dataclass
class Group:
    """The ranks of a run, as seen by one of them.

    Attributes:
        rank: of this process, from 0.
        size: number of ranks; 1 for a process alone, which then has no process groups.
        device: that this rank computes on.
        nodes: name of every rank's node, in order.
        timer: this rank's clock.
        process_group: for tensors; None: they travel in the mesh, too.
        mesh: for small messages.
        reports: for messages that are read after the next one is sent.
        world_ranks: of these ranks among all that run; empty if they are all.
        is_elastic: whether other ranks may come and go; its fields are then others afterwards.
        sums: operations of the process group, if they can be abandoned; else None.
        store: where the ranks found each other, which the process group does not keep alive.
        sum_shares: shares of the sums of gradients that each rank makes (`uneven_all_reduce`); empty for a ring.
        traffic: bytes sent so far.
        exchanged: a checksum of what tensors were gathered for, in order: it is the same on all ranks.
    """

    rank: int
    size: int
    device: torch.device
    nodes: Sequence[str]
    timer: StepTimer
    process_group: dist.ProcessGroup | None = None
    mesh: Mesh | None = None
    reports: Mesh | None = None
    world_ranks: Sequence[int] = ()
    is_elastic: bool = False
    sums: AbortableGloo | None = None
    store: SignedStore | None = None
    sum_shares: Sequence[float] = ()
    traffic: Traffic = field(default_factory=Traffic)
    exchanged: int = 0
    _line_rates: Mapping[str, float] = field(default_factory=dict)
    _owned_messages: int = 0
    _joined: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for the group: prints, writes checkpoints."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether this is the only rank, for the whole run."""
        return self.size == 1 and not self.is_elastic

    def all_gather_bytes(self, message: bytes, topic: str = "") -> list[bytes]:
        """Return every rank's `message`, in order of ranks.

        Raises:
            OutOfStep: another rank has come to a call for something else than `topic`.
        """
        return [message] if self.mesh is None else self.mesh.all_gather(message, topic)

    def broadcast(self, message: bytes, topic: str = "") -> bytes:
        """Return the leader's `message`, of any size; the leader does not wait."""
        return self.broadcast_from(0, message, topic)

    def broadcast_from(self, rank: int, message: bytes, topic: str = "") -> bytes:
        """Return the `message` of one rank, of any size; that rank does not wait."""
        if self.mesh is None:
            return message
        if self.rank != rank:
            return self.mesh.receive_from(rank, topic)
        for peer in self.mesh.peers:
            self.mesh.send_to(peer, message, topic)
        return message

    def meet(self, topic: str) -> None:
        """Wait until every rank has reached `topic`; computing pauses meanwhile.

        Raises:
            OutOfStep: another rank has come to something else, or exchanged other tensors before.
        """
        exchanged = f"{self.exchanged:08x}".encode()
        with self.waiting("meeting"):
            others = self.all_gather_bytes(exchanged, topic)
        for rank, other in enumerate(others):
            if other != exchanged:
                differing = f"{topic}, after other exchanges of tensors"
                raise out_of_step(self.nodes[self.rank], topic, self.nodes[rank], differing)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Copy the leader's `tensors` into those of every rank, which have the same shapes."""
        for tensor in tensors if self.size > 1 else ():
            same = tensor.detach().contiguous()
            if self.process_group is None and self.mesh is not None:
                if tensor.numel():
                    message = self.broadcast(same.cpu().flatten().view(torch.uint8).numpy().tobytes())
                    same = torch.frombuffer(bytearray(message), dtype=tensor.dtype).view(tensor.shape)
            else:
                dist.broadcast(same, group_src=0, group=self.process_group)
            tensor.detach().copy_(same)

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise maximum of every rank's values."""
        rows = self.all_gather_bytes(np.asarray(values, dtype=np.float64).tobytes())
        return [float(v) for v in np.max([np.frombuffer(row) for row in rows], axis=0)]

    def barrier(self, topic: str = "") -> None:
        """Wait until every rank has called this."""
        self.all_gather_bytes(b".", topic)

    def all_reduce(self, tensor: Tensor, kind: str) -> Tensor:
        """Sum `tensor` over the ranks, in place, and return it; computing pauses meanwhile."""
        if self.size == 1:
            return tensor
        with self.waiting(kind):
            self.begin_all_reduce(tensor, kind)()
        return tensor

    def begin_all_reduce(self, tensor: Tensor, kind: str) -> Callable[[], object]:
        """Start to sum `tensor` over the ranks, in place; return a function that waits for it."""
        if self.size == 1:
            return lambda: None
        if self.sums is not None or self._has_owners(tensor, kind):
            return self.sum_later(tensor, kind).wait
        self.count_all_reduce(tensor, kind)
        if self.process_group is None:
            gather = self._begin_flat_gather
            return lambda: tensor.copy_(gather(tensor.flatten(), kind)().view(self.size, *tensor.shape).sum(0))
        work = dist.all_reduce(tensor, group=self.process_group, async_op=True)
        assert work is not None
        return lambda: work.wait()

    def sum_later(self, tensor: Tensor, kind: str) -> torch.futures.Future[Tensor]:
        """Start to sum `tensor` over the ranks by their process group, in place; return its future."""
        if self.size == 1:
            alone: torch.futures.Future[Tensor] = torch.futures.Future()
            alone.set_result(tensor)
            return alone
        if self._has_owners(tensor, kind):
            return self._begin_uneven_all_reduce(tensor, kind)
        self.count_all_reduce(tensor, kind)
        if self.sums is not None:
            return self.sums.all_reduce(tensor)
        work = dist.all_reduce(tensor, group=self.process_group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]

    def all_gather(self, tensor: Tensor, kind: str, topic: str = "") -> Tensor:
        """Return every rank's `tensor` of one shape, stacked: (size, *tensor.shape); computing pauses meanwhile."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        with self.waiting(kind):
            return self._begin_gather(tensor, kind, topic)()

    def all_sum(self, tensor: Tensor, kind: str) -> Tensor:
        """Return the sum of small tensors in the order of ranks, bitwise equal on all; computing pauses meanwhile."""
        return self.all_gather(tensor, kind).sum(0)

    def begin_all_sum(self, tensor: Tensor, kind: str, topic: str = "") -> Callable[[], Tensor]:
        """Start `all_sum`; return a function that waits for it, to be called before another collective begins."""
        if self.size == 1:
            return lambda: tensor
        self.timer.break_for_others()
        arrive = self._begin_gather(tensor, kind, topic)

        def finish() -> Tensor:
            with self.waiting(kind):
                return arrive().sum(0)

        return finish

    @contextmanager
    def waiting(self, kind: str) -> Iterator[None]:
        """Pause computing inside, and count the seconds under `kind`."""
        phase = self.timer.phase
        self.timer.pause()
        start = time.perf_counter()
        yield
        self.traffic.seconds[kind] = self.traffic.seconds.get(kind, 0) + time.perf_counter() - start
        if phase:
            self.timer.resume(phase)

    @property
    def prefers_mesh(self) -> bool:
        """Whether small tensors are faster over the mesh than by a collective, as on processors."""
        return self.mesh is not None and not self.has_accelerators

    @property
    def has_accelerators(self) -> bool:
        """Whether a rank computes on an accelerator; the same on all ranks of several."""
        if self.process_group is None:
            return is_accelerator(self.device)
        return dist.get_backend(self.process_group) != "gloo"

    def has_same_generators(self) -> bool:
        """Return whether equal seeds make the devices of all ranks draw equal numbers; every rank calls this."""
        if self.size == 1 or not self.has_accelerators:
            return True
        own = f"{self.device.type}: {model_and_units(self.device)}"
        return len(set(self.all_gather_bytes(own.encode(), "devices"))) == 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # copies of a model are of the same ranks

    def _begin_gather(self, tensor: Tensor, kind: str, topic: str) -> Callable[[], Tensor]:
        self.traffic.count(kind, *([tensor.nbytes * (self.size - 1)] * 2))
        arrive = self._begin_flat_gather(tensor.flatten(), topic or kind)
        return lambda: arrive().view(self.size, *tensor.shape)

    def _begin_flat_gather(self, flat: Tensor, topic: str) -> Callable[[], Tensor]:
        self.exchanged = zlib.crc32(topic.encode(), self.exchanged)
        if self.mesh is not None and self.prefers_mesh:
            receive = self.mesh.begin_exchange(bytes_of(flat), topic)
            return lambda: torch.frombuffer(bytearray(b"".join(receive())), dtype=flat.dtype).to(flat.device)
        gathered = flat.new_empty(self.size * flat.numel())
        if self.sums is None:
            work = _all_gather(gathered, flat, group=self.process_group, async_op=True)
        else:
            rows = list(gathered.view(self.size, flat.numel()).unbind())
            work = dist.all_gather(rows, flat, group=self.process_group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return gathered

        return wait

    def count_all_reduce(self, tensor: Tensor, kind: str) -> None:
        """Count one ring all-reduce of `tensor`: 2 (p-1)/p of its bytes, sent and received."""
        nbytes = 2 * (self.size - 1) * tensor.nbytes / self.size
        self.traffic.count(kind, nbytes, nbytes)

    def divide_sums(self, rates: Mapping[str, float]) -> None:
        """Divide sums of gradients by the lines of nodes, also when the ranks change; all ranks call this.

        Args:
            rates: bytes per second that each node's line carries each way; while ranks of other nodes take part, and
                where lines are alike, sums are made in a ring.
        """
        self._line_rates = dict(rates)
        self._choose_owners()

    def _choose_owners(self) -> None:
        may_divide = self.process_group is not None and not self.has_accelerators
        self.sum_shares = shares_among(self.nodes, self._line_rates) if may_divide else ()

    def _has_owners(self, tensor: Tensor, kind: str) -> bool:
        """Whether the elements of a sum have owners; the same on all ranks."""
        return bool(self.sum_shares) and kind in _WITH_OWNERS and tensor.is_contiguous()

    def _begin_uneven_all_reduce(self, tensor: Tensor, kind: str) -> torch.futures.Future[Tensor]:
        """Start to sum `tensor` by owners, in place; return its future."""
        begun: list[UnevenAllReduce] = []

        def start(gloo: Any) -> UnevenAllReduce:
            begun.append(UnevenAllReduce(gloo, self.rank, self.sum_shares, tensor.detach(), self._owned_messages))
            return begun[0]

        if self.sums is not None:
            future = self.sums.message(start, tensor, "uneven all-reduce")
        else:
            group: Any = self.process_group
            future = _in_thread(start(group._get_backend(torch.device("cpu"))).wait, tensor)
        self._owned_messages += begun[0].num_tags
        self.traffic.count(kind, begun[0].nbytes, begun[0].nbytes)
        return future

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """Return the group of `ranks`, which all ranks have to call; None on a rank outside of it.

        The same ranks share one process group, however often this is called: each has threads and connections.
        """
        if self.size == 1 or list(ranks) == list(range(self.size)):
            return self
        world = [self.world_ranks[rank] for rank in ranks] if self.world_ranks else list(ranks)
        process_group = self._joined_among(tuple(ranks), world)
        if self.rank not in ranks:
            return None
        alone = len(ranks) == 1
        return Group(
            rank=list(ranks).index(self.rank),
            size=len(ranks),
            device=self.device,
            nodes=[self.nodes[rank] for rank in ranks],
            timer=self.timer,
            process_group=None if alone else process_group,
            mesh=None if alone or self.mesh is None else self.mesh.subset(ranks),
            reports=None if alone or self.reports is None else self.reports.subset(ranks),
            world_ranks=world,
            sums=process_group.operations if isinstance(process_group, AbortableProcessGroup) else None,
        )

    def narrow(self, ranks: Sequence[int]) -> bool:
        """Restrict this group to `ranks`, which all of it have to call; return whether this rank is among them."""
        group = self.subgroup(ranks)
        if group is None or group is self:
            return group is not None
        self.rank, self.size, self.nodes = group.rank, group.size, group.nodes
        self.process_group, self.mesh, self.reports = group.process_group, group.mesh, group.reports
        self.sums, self.world_ranks, self._joined = group.sums, group.world_ranks, {}
        self._choose_owners()
        return True

    def _joined_among(self, ranks: tuple[int, ...], world: list[int]) -> dist.ProcessGroup | None:
        """Return the process group of `ranks`, numbers `world` among all ranks; None if it needs none."""
        if ranks not in self._joined:
            if self.sums is None:  # others of the world than this group's ranks do not call this
                made = dist.new_group(world, use_local_synchronization=bool(self.world_ranks))
            elif self.rank in ranks and len(ranks) > 1:
                made = AbortableProcessGroup(ranks.index(self.rank), len(ranks), self.sums.among(ranks))
            else:
                return None
            self._joined[ranks] = made
        return self._joined[ranks]

    def become(
        self, rank: int, nodes: Sequence[str], mesh: Mesh | None, reports: Mesh | None, sums: AbortableGloo | None
    ) -> None:
        """Replace ranks and connections of this elastic group; connections are None for a single rank."""
        for group in (self.process_group, *self._joined.values()):
            if isinstance(group, AbortableProcessGroup) and group is not dist.group.WORLD:
                forget_in_torch(group)
        self.rank, self.size, self.nodes = rank, len(nodes), nodes
        self.mesh, self.reports, self.sums = mesh, reports, sums
        self.process_group = None if sums is None else AbortableProcessGroup(rank, len(nodes), sums)
        self.world_ranks, self._joined, self._owned_messages = (), {}, 0
        self._choose_owners()


def _in_thread(wait: Callable[[], object], tensor: Tensor) -> torch.futures.Future[Tensor]:
    """Return a future of `tensor`, which is set when `wait`, called in a thread, has returned."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()

    def run() -> None:
        try:
            wait()
        except Exception as error:
            failed: Any = error
            future.set_exception(failed)
        else:
            future.set_result(tensor)

    threading.Thread(target=run, name="evener-all-reduce", daemon=True).start()
    return future.then(lambda done: done.value())  # through which C++ sees an error, too


def bytes_of(flat: Tensor) -> bytes:
    """Return the bytes of a tensor of one dim, also of one element with any stride, which `view` would refuse."""
    dense = flat.detach().cpu().contiguous().as_strided(flat.shape, (1,))
    return dense.view(torch.uint8).numpy().tobytes()
