"""A server on a tiny state, and a hand that writes into its inboxes: for tests of single messages."""

from __future__ import annotations

import numpy as np

from evener.agreements.layout import ArraySpec, Flat, StateLayout
from evener.agreements.messages import Answer, Lease, Push, ServerOutput
from evener.agreements.parameter_server import ParameterServer
from evener.agreements.settings import AgreementSettings, Workload

LAYOUT = StateLayout(
    entries=(
        ArraySpec(name="w", shape=(4,), dtype="float64", kind="parameter"),
        ArraySpec(name="tracked", shape=(), dtype="int64", kind="counter"),
    )
)


class Desk:
    """Remembers the open leases of every worker and the last answers."""

    def __init__(self, agreement: AgreementSettings, num_samples: int = 100, quorum: int = 1, **ends: int) -> None:
        epochs, updates = ends.get("num_epochs", 1), ends.get("num_updates")
        workload = Workload(num_samples=num_samples, num_epochs=epochs, num_updates=updates)
        self.server = ParameterServer(agreement, workload, Flat(LAYOUT), quorum=quorum)
        self.leases: dict[str, list[Lease]] = {}
        self.last = ServerOutput()

    def admit(self, *names: str, seconds: float | None = None) -> None:
        """Admit workers, all with `seconds` a sample."""
        for name in names:
            if seconds is not None:
                self.server.worker(name).speed.benchmark(seconds)
            self.heed(self.server.admit(name))

    def dismiss(self, name: str) -> None:
        self.leases.pop(name, None)
        self.heed(self.server.dismiss(name))

    def push(self, name: str, value: float, lease: Lease | None = None) -> dict[str, list[Answer]]:
        """Contribute `value` for the oldest lease of `name`, or for `lease`; returns the answers by worker."""
        lease = lease or self.leases[name].pop(0)
        change = Flat(LAYOUT)
        change.parameters[0][:] = value
        change.counters[:] = 1
        inbox = self.server.inbox(name, lease.number)
        if inbox is not None:
            inbox[:] = change.memory.data
        push = Push(number=lease.number, seconds=float(lease.num_samples), loss=value)
        self.heed(self.server.push(name, push, LAYOUT.num_bytes))
        return self.answers()

    def answers(self) -> dict[str, list[Answer]]:
        found: dict[str, list[Answer]] = {}
        for reply in self.last.replies:
            found.setdefault(reply.worker, []).append(reply.answer)
        return found

    @property
    def value(self) -> float:
        """That all parameters have."""
        w = self.server.weights.parameters[0]
        assert (w == w[0]).all()
        return float(w[0])

    def weights_for(self, name: str) -> float:
        """The parameters that `name` was sent with the last outcome."""
        image = next(r.image for r in self.last.replies if r.worker == name and r.image is not None)
        return float(Flat(LAYOUT, np.frombuffer(image, np.uint8)).parameters[0][0])

    def heed(self, outcome: ServerOutput) -> None:
        """Remember an outcome."""
        self.last = outcome
        for reply in outcome.replies:
            if reply.answer.resets_leases:
                self.leases[reply.worker] = []
            if reply.answer.lease is not None:
                self.leases[reply.worker].append(reply.answer.lease)
