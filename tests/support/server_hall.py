"""A parameter server with imagined workers: every contribution adds 1 to the counter of its lease."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from evener.agreements.compression import Compressor
from evener.agreements.layout import ArraySpec, Flat, StateLayout
from evener.agreements.messages import Answer, Lease, Push, ServerOutput, positions
from evener.agreements.parameter_server import ParameterServer
from evener.agreements.settings import AgreementSettings, Sgd, Workload
from evener.agreements.threads import ThreadPool

SAMPLES, EPOCHS, MOST_LEASES = 23, 2, 4096
LAYOUT = StateLayout(
    entries=(
        ArraySpec(name="w", shape=(3,), dtype="float32", kind="parameter"),
        ArraySpec(name="applied", shape=(MOST_LEASES,), dtype="int64", kind="counter"),
    )
)


SGD = Sgd(learning_rate=0.5)


CASES = {
    "sync": AgreementSettings(batch=7, outer=SGD),
    "sync, fixed": AgreementSettings(batch=3, outer=SGD, division="fixed"),
    "sync, overlapped": AgreementSettings(batch=7, outer=SGD, contribution="delta", is_overlapped=True),
    "sync, int8 both ways": AgreementSettings(batch=7, outer=SGD, push="int8", pull="bf16"),
    "sync, top-k both ways": AgreementSettings(batch=7, outer=SGD, push="top-k", pull="top-k"),
    "average of an epoch": AgreementSettings(batch=4, outer=SGD, contribution="delta", local_steps="epoch"),
    "local steps": AgreementSettings(batch=2, outer=SGD, contribution="delta", local_steps=3),
    "local steps, overlapped": AgreementSettings(
        batch=2, outer=SGD, contribution="delta", local_steps=3, is_overlapped=True, pull="int8"
    ),
    "local steps, top-k both ways": AgreementSettings(
        batch=2, outer=SGD, contribution="delta", local_steps=3, push="top-k", pull="top-k"
    ),
    "local steps, skipping late workers": AgreementSettings(
        batch=2, outer=SGD, contribution="delta", local_steps=3, skips_late=True
    ),
    "async": AgreementSettings(batch=4, outer=SGD, staleness=None),
    "async, overlapped": AgreementSettings(
        batch=4, outer=SGD, staleness=None, contribution="delta", is_overlapped=True
    ),
    "bounded": AgreementSettings(batch=2, outer=SGD, staleness=2),
    "bounded, overlapped": AgreementSettings(batch=2, outer=SGD, staleness=1, contribution="delta", is_overlapped=True),
}


SECONDS = {"a": 1.0, "b": 2.0, "c": 5.0}


class Hall:
    """A server with workers that do what they are told, and notes of all that was heard."""

    def __init__(self, agreement: AgreementSettings) -> None:
        self.agreement = agreement
        workload = Workload(num_samples=SAMPLES, num_epochs=EPOCHS)
        self.server = ParameterServer(agreement, workload, Flat(LAYOUT))
        self.held: dict[str, deque[Lease]] = {}
        self.leases: dict[int, tuple[str, Lease]] = {}
        self.sent: dict[str, list[tuple[Push, bytes]]] = {name: [] for name in SECONDS}
        self.refused: set[int] = set()
        self.versions: list[int] = []
        self.finished: dict[str, int] = {}

    def act(self, action: str, name: str) -> None:
        is_here, has_lease = name in self.held, bool(self.held.get(name))
        if action in ("join", "connect"):
            self._admit(name)
        elif action == "die" and is_here:
            del self.held[name]
            self.heed(self.server.dismiss(name))
        elif action == "skip":
            self.heed(self.server.skip(name))
        elif action == "again" and self.sent[name]:
            self._repeat(name)
        elif action in ("push", "nan", "short", "parts") and has_lease:
            self._push(name, action)
        self.check()

    def _admit(self, name: str) -> None:
        if name not in self.held:
            self.finished[name] = min((self.finished[other] for other in self.held), default=0)
        self.held.setdefault(name, deque())
        self.server.worker(name).speed.benchmark(SECONDS[name])
        self.heed(self.server.admit(name))

    def _push(self, name: str, how: str) -> None:
        lease = self.held[name].popleft()
        push = Push(number=lease.number, seconds=lease.num_samples * SECONDS[name], loss=1.0)
        inbox = self.server.inbox(name, lease.number)
        assert inbox is not None
        image = self._image(lease, is_finite=how != "nan")
        for stop in (len(image) // 3, len(image)) if how == "parts" else (len(image),):
            inbox[:stop] = image[:stop]
            self.server.arrived(name, lease.number, stop)
        del inbox
        if how in ("nan", "short"):
            self.refused.add(lease.number)
        self.finished[name] += 1
        self.sent[name].append((push, image))
        self.heed(self.server.push(name, push, len(image) - (how == "short")))

    def _repeat(self, name: str) -> None:
        push, image = self.sent[name][-1]
        inbox = self.server.inbox(name, push.number)
        if inbox is not None:
            inbox[:] = image
        self.heed(self.server.push(name, push, len(image)))

    def _image(self, lease: Lease, is_finite: bool) -> bytes:
        change = Flat(LAYOUT)
        change.parameters[0][:] = 0.25 if is_finite else np.nan
        change.counters[lease.number] = 1
        if self.agreement.push == "none":
            return change.memory.tobytes()
        image = np.zeros(self.server.push_bytes, np.uint8)
        Compressor(LAYOUT, self.agreement.push, ThreadPool(1)).pack(change, Flat(LAYOUT), image)
        return image.tobytes()

    def heed(self, outcome: ServerOutput) -> None:
        for update in outcome.updates:
            self.versions.append(update.version)
            assert all(stale >= 0 for stale in update.staleness.values())
        for reply in outcome.replies:
            self._hear(reply.worker, reply.answer)

    def _hear(self, name: str, answer: Answer) -> None:
        if name not in self.held:
            return
        if answer.resets_leases:
            self.held[name].clear()
        if answer.lease is not None:
            self.held[name].append(answer.lease)
            self.leases[answer.lease.number] = (name, answer.lease)
            self._check_bound(name)

    def _check_bound(self, name: str) -> None:
        """Nobody begins more than s turns ahead of the slowest."""
        bound = self.agreement.staleness
        if bound:
            slowest = min(self.finished[other] for other in self.held)
            assert self.finished[name] + len(self.held[name]) - 1 - slowest <= bound

    def check(self) -> None:
        """Somebody can always go on."""
        assert self.server.is_over or not self.held or any(self.held.values())

    def finish(self) -> None:
        """Let all that are here work to the end."""
        if not self.held:
            self.act("join", "a")
        for _ in range(2_000):
            if self.server.is_over:
                return
            self.act("push", next(name for name, leases in self.held.items() if leases))
        raise AssertionError("the run does not end")

    def used(self) -> Counter[tuple[int, int]]:
        """How often each (epoch, position) went into the weights, or was refused."""
        times = self.server.weights.counters
        found: Counter[tuple[int, int]] = Counter()
        for number, (_, lease) in self.leases.items():
            count = int(times[number]) + (number in self.refused)
            for position in positions(lease.samples):
                found[lease.samples.epoch, int(position)] += count
        return found
