"""A training run at the master without sockets, with two nodes at work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np

from evener.agreements.compression import compressor_for
from evener.agreements.layout import Flat, layout_of
from evener.agreements.messages import Lease, Push
from evener.agreements.parameter_server import ParameterServer
from evener.agreements.settings import AgreementSettings, Workload
from evener.agreements.threads import ThreadPool
from evener.ps.master.lease_training import LeaseTraining
from evener.ps.master.nodes import Nodes
from evener.ps.protocol.job import Job
from evener.ps.protocol.messages import Contribution, Header, ServerReply
from evener.records.history import History
from evener.wire.frame import Buffer

LAYOUT = layout_of({"w": np.zeros(4, np.float32)})


class Stage:
    """A run with two nodes that are at work; what it sends is kept."""

    def __init__(self, agreement: AgreementSettings, epochs: int = 5, room: Callable[[], float] = lambda: inf) -> None:
        workload = Workload(num_samples=20, num_epochs=epochs)
        job = Job(
            run="r",
            task="t",
            title="t",
            agreement_name="p",
            agreement=agreement,
            workload=workload,
            layout=LAYOUT,
            num_validation=8,
        )
        self.now = 0.0
        self.nodes, self.sent = Nodes(15.0), list[tuple[int | None, Header]]()
        server = ParameterServer(agreement, workload, Flat(LAYOUT))
        self.run = LeaseTraining(job, server, History(), self.nodes, self.send, lambda: self.now, room)
        self.leases: dict[str, list[Lease]] = {"a": [], "b": []}
        for peer, name in enumerate("ab"):
            node = self.nodes.record(name)
            self.nodes.decide("joined", node, 0.0, incarnation=1)
            self.nodes.connect(node, peer)
            self.run.ready(node, 1.0)
        self.run.begin(self.nodes.present)
        self.deliver()

    def send(self, peer: int | None, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        self.sent.append((peer, header))

    def deliver(self) -> list[Any]:
        """What is sent, leases apart, which are kept."""
        headers = []
        while self.sent:
            peer, header = self.sent.pop(0)
            if isinstance(header, ServerReply):
                if header.answer.lease is not None and peer is not None:
                    self.leases["ab"[peer]].append(header.answer.lease)
            else:
                headers.append(header)
        return headers

    def push(self, name: str, value: float = 1.0) -> None:
        lease = self.leases[name].pop(0)
        header = Contribution(run="r", push=Push(number=lease.number, seconds=1.0, loss=1.0))
        change, agreement = Flat(LAYOUT), self.run.job.agreement
        change.floats[0][:] = value
        data = change.memory
        if packing := compressor_for(LAYOUT, agreement.push, ThreadPool(1)):
            data = np.empty(packing.num_bytes, np.uint8)
            packing.pack(change, Flat(LAYOUT), data)
        inbox = self.run.inbox(self.nodes.by_name[name], header, len(data))
        assert inbox is not None
        inbox[:] = data.tobytes()
        del inbox
        self.run.contribute(self.nodes.by_name[name], header, len(data))
