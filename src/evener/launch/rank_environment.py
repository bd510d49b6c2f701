"""What a rank finds when it starts, how its program is run there, and how it notices that another is lost.
Every rank writes a growing number and its step to the store that all share, several times a second, from a thread of
its own: it works when the main thread waits inside a collective for ever. The rule is that of `evener.heartbeat`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from evener.comm.signed_store import SignedStore
from evener.elastic.line import Line
from evener.errors import (
    DoesNotFit,
    EvenerError,
    NodeLost,
    NonFiniteLoss,
    TrainingFailed,
    first_line,
    is_noted,
    place_of,
)
from evener.events import RunEvent
from evener.heartbeat import Progress, interval
from evener.launch.nodes import LocalNode
from evener.record import Epoch
from evener.signals import first_request

_BROKEN = ("gloo/transport", "connection closed by peer", "connection reset by peer", "nccl error", "ncclsystemerror")
_FAILURE = "failure"


class RankHeartbeat:
    """One rank's heartbeat, and its ear for those of the others.

    Args:
        store: shared by all ranks; used by this thread alone.
        rank: of this process.
        nodes: name of every rank's node.
        patience: seconds of silence after which a rank is lost.
        on_lost: called once, in this thread, with one sentence about who is lost.
        keeps_store: whether the store is kept by this process, and gone with it.

    Attributes:
        step: that this rank works on.
    """

    def __init__(
        self,
        store: SignedStore,
        *,
        rank: int,
        nodes: Sequence[str],
        patience: float,
        on_lost: Callable[[str], None],
        keeps_store: bool = False,
    ) -> None:
        self._thread = threading.Thread(target=self._run, name="evener-heartbeat", daemon=True)
        self.step = 0
        self._store, self._rank, self._nodes = store, rank, nodes
        self._patience, self._on_lost, self._keeps_store = patience, on_lost, keeps_store
        self._done = threading.Event()
        now = time.monotonic()
        self._others = {other: Progress(now) for other in range(len(nodes)) if other != rank}

    def start(self) -> None:
        """Begin to beat and to listen, until stopped or until somebody is lost."""
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Wait at most `timeout` seconds until the heartbeat has ended."""
        self._thread.join(timeout)

    def stop(self) -> None:
        """End the heartbeat; this rank counts as having left, not as lost. Who keeps the store, outlasts the others."""
        self._done.set()
        self._leave(_left(self._rank), "1")
        if self._thread.ident is not None:
            self.join(timeout=self._patience)
        if self._keeps_store:
            self._outlast_others()

    def report_failure(self, sentence: str) -> None:
        """Publish this rank's own failure, so that the others need not wait to name it."""
        self._leave(_FAILURE, sentence)

    def _outlast_others(self) -> None:
        """Return when every other rank has left, has heard of a failure, or is silent for too long."""
        pause = threading.Event()
        while any(self._needs_store(other, time.monotonic()) for other in self._others):
            pause.wait(interval(self._patience))

    def _needs_store(self, other: int, now: float) -> bool:
        if self._store.check([_left(other)]) or self._store.check([_heard(other)]):
            return False
        return self._others[other].idle_seconds(read_beat(self._store, other)[0], now=now) <= self._patience

    def _run(self) -> None:
        count = 0
        while not self._done.wait(interval(self._patience)):
            count += 1
            sentence = self._beat(count)
            if sentence and not self._done.is_set():
                self._on_lost(sentence)
                return

    def _leave(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError:
            return  # the store is gone, and with it whoever could have read this

    def _beat(self, count: int) -> str | None:
        """Beat, then listen to the others; a sentence if one of them is lost."""
        try:
            self._store.set(_key(self._rank), f"{count}:{self.step}")
            if self._store.check([_FAILURE]):
                self._store.set(_heard(self._rank), "1")
                return str(self._store.get(_FAILURE).decode())
            return self._find_lost(time.monotonic())
        except NodeLost as error:
            return str(error)
        except RuntimeError as error:
            return f"the store that all ranks share is gone, with the process that kept it ({first_line(error)})"

    def _find_lost(self, now: float) -> str | None:
        beats = {other: read_beat(self._store, other) for other in self._others}
        idle = {other: p.idle_seconds(beats[other][0], now=now) for other, p in self._others.items()}
        for other, seconds in idle.items():
            if seconds > self._patience and not self._store.check([_left(other)]):
                return (
                    f"node {self._nodes[other]} (rank {other}) has been silent for {self._patience:g} s, "
                    f"at step {beats[other][1]}; node {self._nodes[self._rank]} waited for it"
                )
        return None


def read_beat(store: SignedStore, rank: int) -> tuple[int, int]:
    """The number of the last heartbeat of `rank` and the step that it works on; zeros before the first."""
    if not store.check([_key(rank)]):
        return 0, 0
    count, step = store.get(_key(rank)).decode().split(":")
    return int(count), int(step)


def _left(rank: int) -> str:
    return f"left/{rank}"


def _heard(rank: int) -> str:
    return f"heard/{rank}"


def _key(rank: int) -> str:
    return f"beat/{rank}"


def end_process(error: EvenerError) -> None:
    """End this process at once by `error`, which the user reads; for a process that nobody else relays."""
    os.write(2, f"evener: {error}\n".encode())
    os._exit(error.exit_code)


@dataclass
class RankEnvironment:
    """One rank's place in a run.

    Attributes:
        rank: of this process.
        nodes: one a rank, in order.
        device: that this rank computes on.
        patience: seconds that the others' silence is borne.
        notify: shows an event to the user; effective on every rank, used by the leader.
        store: where the ranks find each other; None for a process alone.
        heartbeat: by which the ranks know that all of them live; None for a process alone.
        address: of this machine, at which the other ranks reach it.
        end: ends this process at once by an error, from any thread: the main one may wait in a collective for ever.
        answer: what whoever was notified of the end of an epoch says to it; None where `notify` returns that itself.
        line: to the authority of an elastic run; None in others.
        step: that this rank works on; 0 before the first.
        stop_requested: whether a signal asked this process to stop.
    """

    rank: int
    nodes: list[LocalNode]
    device: torch.device
    patience: float
    notify: Callable[[Any], object]
    store: SignedStore | None = None
    heartbeat: RankHeartbeat | None = None
    address: str = "127.0.0.1"
    end: Callable[[EvenerError], None] = end_process
    answer: Callable[[Epoch], bool] | None = None
    line: Line | None = None
    step: int = 0
    stop_requested: bool = field(default=False)

    @property
    def node(self) -> LocalNode:
        """This rank's own node."""
        return self.nodes[self.rank]

    @property
    def names(self) -> list[str]:
        """Of all nodes, in order of ranks."""
        return [node.name for node in self.nodes]

    @property
    def backend(self) -> str:
        """For tensors: NCCL if every rank has a GPU of its own, else Gloo: NCCL refuses two ranks on one GPU."""
        places = {(node.host, node.device) for node in self.nodes}
        on_gpus = all(node.device.startswith("cuda") for node in self.nodes)
        return "nccl" if on_gpus and len(places) == len(self.nodes) else "gloo"

    def request_stop(self) -> None:
        """Stop after the current step."""
        self.stop_requested = True

    def stop_on(self, *signals: signal.Signals) -> None:
        """From now on `signals` ask this rank to stop after its current step."""
        for number in signals:
            signal.signal(number, lambda *_: self.request_stop())

    def is_over(self, epoch: Epoch) -> bool:
        """Notify of the end of `epoch`; whether the run is to end there."""
        said = self.notify(epoch)
        return bool(said) if self.answer is None else self.answer(epoch)

    def at_step(self, step: int) -> None:
        """Note the step that this rank works on."""
        self.step = step
        if self.heartbeat is not None:
            self.heartbeat.step = step


Program = Callable[[RankEnvironment, Any], None]


def run_inprocess(
    program: Program, node: LocalNode, config: Any, *, patience: float, on_event: Callable[[RunEvent], object]
) -> None:
    """Run `program` on `node` here. Ctrl-C asks it to stop after its step, a second one stops it at once.

    Raises:
        KeyboardInterrupt: Ctrl-C before the first step, or the program has no steps.
    """
    env = RankEnvironment(rank=0, nodes=[node], device=torch.device(node.device), patience=patience, notify=on_event)

    def stop() -> None:
        if not env.step:
            raise KeyboardInterrupt
        env.request_stop()

    with first_request(stop):
        run_rank(env, program, config)


def run_rank(env: RankEnvironment, program: Program, config: Any) -> None:
    """Run `program` as the rank of `env`, with heartbeats; errors come out as the one error that explains them.

    Raises:
        NodeLost: the connection to another rank broke; the others' heartbeats name the culprit.
        EvenerError: whatever else the program raises on purpose.
    """
    if env.heartbeat is not None:
        env.heartbeat.start()
    try:
        program(env, config)
    except Exception as error:
        meaning = _meaning(error, env)
        if env.heartbeat is not None and _is_of_this_rank_alone(meaning):
            env.heartbeat.report_failure(f"node {env.node.name} (rank {env.rank}) failed: {meaning}")
        if meaning is error:
            raise
        raise meaning from error
    finally:
        if env.heartbeat is not None:
            env.heartbeat.stop()


def _meaning(error: Exception, env: RankEnvironment) -> Exception:
    """The error that tells the user what happened; `error` itself where there is nothing to add."""
    if isinstance(error, EvenerError) and not is_noted(error):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return DoesNotFit(
            f"node {env.node.name} ran out of memory ({error}); use a smaller --batch-size, or --accumulate"
        )
    if len(env.nodes) > 1 and isinstance(error, RuntimeError) and is_broken_connection(error):
        at = "" if env.heartbeat is None else f" at step {env.heartbeat.step}"
        return NodeLost(f"node {env.node.name} (rank {env.rank}) lost its connection{at}")
    if place := place_of(error):
        return TrainingFailed(f"{type(error).__name__}: {error}{place}")
    return error


def _is_of_this_rank_alone(error: Exception) -> bool:
    """Whether the others do not see the same error themselves, and have to be told."""
    if isinstance(error, EvenerError):
        return isinstance(error, TrainingFailed | DoesNotFit) and not isinstance(error, NonFiniteLoss)
    return True


def is_broken_connection(error: RuntimeError) -> bool:
    """Whether a collective says that another rank is gone."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in _BROKEN)
