"""A server and its workers in one thread: whoever is told to moves by one step, so that a test decides every order."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from evener.agreements.messages import Answer, Lease, Push, ServerOutput, Update
from evener.agreements.parameter_server import ParameterServer
from evener.agreements.settings import AgreementSettings
from evener.agreements.worker import WorkerReplica
from support.numpy_engine import NumpyEngine


class Hand:
    """One worker, whose messages and answers wait until somebody moves them."""

    def __init__(self, engine: NumpyEngine, replica: WorkerReplica, depth: int) -> None:
        self.engine, self.replica, self._depth = engine, replica, depth
        self.mail: deque[tuple[Answer, bytes | None]] = deque()
        self.leases: deque[Lease] = deque()
        self.outbox: deque[tuple[Push, bytes]] = deque()
        self.answers: list[Answer] = []
        self.is_done = False

    def move(self) -> bool:
        """Do what is next; False if it could only wait."""
        if self.is_done:
            return False
        if self.leases and len(self.replica.underway) < self._depth:
            push, image = self.replica.work(self.leases.popleft())
            self.outbox.append((push, bytes(image)))
            return True
        if not self.mail:
            return False
        answer, data = self.mail.popleft()
        self.answers.append(answer)
        self.replica.take(answer, None if data is None else memoryview(data))
        if answer.resets_leases:
            self.leases.clear()
        if answer.lease is not None and answer.lease.number not in self.replica.underway:
            self.leases.append(answer.lease)
        self.is_done = answer.is_last
        return True


class SteppedServer:
    """A server and hands; every message takes one call."""

    def __init__(self, server: ParameterServer, agreement: AgreementSettings) -> None:
        self.server, self._agreement = server, agreement
        self.hands: dict[str, Hand] = {}
        self.updates: list[Update] = []

    def join(self, name: str, engine: NumpyEngine, seconds: float | None = None) -> Hand:
        ticks = iter(range(10**9))
        replica = WorkerReplica(engine, self._agreement, clock=lambda: float(next(ticks)))
        hand = self.hands[name] = Hand(engine, replica, self._agreement.depth)
        if seconds is not None:
            self.server.worker(name).speed.benchmark(seconds)
        self.heed(self.server.admit(name))
        return hand

    def lose(self, name: str) -> None:
        del self.hands[name]
        self.heed(self.server.dismiss(name))

    def deliver(self, name: str) -> None:
        """One message of `name` reaches the server."""
        push, image = self.hands[name].outbox.popleft()
        self.send(name, push, image)

    def send(self, name: str, push: Push, image: bytes) -> ServerOutput:
        inbox = self.server.inbox(name, push.number, len(image))
        if inbox is not None and len(image) == len(inbox):
            inbox[:] = image
        outcome = self.server.push(name, push, len(image))
        self.heed(outcome)
        return outcome

    def heed(self, outcome: ServerOutput) -> None:
        self.updates += outcome.updates
        for reply in outcome.replies:
            if reply.worker in self.hands:
                data = None if reply.image is None else bytes(reply.image)
                self.hands[reply.worker].mail.append((reply.answer, data))

    def run(self, most: int = 10**6) -> None:
        """Let everybody move in turn until nobody can."""
        for _ in range(most):
            moved = [self.turn(name) for name in list(self.hands)]
            if not any(moved):
                return
        raise AssertionError("the run does not end")

    def turn(self, name: str) -> bool:
        """Let `name` send, work or listen; False if it could only wait."""
        if self.hands[name].outbox:
            self.deliver(name)
            return True
        return self.hands[name].move()


def run_stepped(
    server: ParameterServer,
    agreement: AgreementSettings,
    engines: Mapping[str, NumpyEngine],
    seconds: Mapping[str, float] | None = None,
) -> SteppedServer:
    """A whole run with `engines` by name, to its end."""
    stepped = SteppedServer(server, agreement)
    for name, engine in engines.items():
        stepped.join(name, engine, (seconds or {}).get(name))
    stepped.run()
    return stepped
