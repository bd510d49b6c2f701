"""A seat is one rank's place in a run: who it is, whom it works with, how it finds and tells the others.

The same program runs in every seat, whether this process started its ranks itself or torchrun (Slurm, Kubernetes, Ray
through it) started them and left the standard environment variables.
"""

from __future__ import annotations

import os
import signal
import socket
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import evener
from evener.errors import DoesNotFit, EvenerError, Interrupted, InvalidValue, NodeLost, NonFiniteLoss, TrainingFailed
from evener.host import own_address
from evener.launch.nodes import LocalNode
from evener.launch.watch import Watch

_BROKEN = ("gloo/transport", "connection closed by peer", "connection reset by peer", "nccl error", "ncclsystemerror")
_NOT_THE_USERS = (str(Path(evener.__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "purelib")), "<")


@dataclass
class Seat:
    """One rank's place.

    Attributes:
        rank: of this process.
        nodes: one a rank, in order.
        device: that this rank computes on.
        store: where the ranks find each other; None for a process alone.
        patience: seconds that the others' silence is borne.
        emit: tells the user's terminal; effective on every rank, used by the leader.
        watch: over the others; None for a process alone.
        address: of this machine, at which the other ranks reach it.
        stop_asked: whether a signal asked this process to stop.
    """

    rank: int
    nodes: list[LocalNode]
    device: torch.device
    patience: float
    emit: Callable[[Any], None]
    store: dist.Store | None = None  # type: ignore[name-defined]
    watch: Watch | None = None
    address: str = "127.0.0.1"
    stop_asked: bool = field(default=False)

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
        """For tensors: NCCL if every rank has a GPU, else Gloo."""
        return "nccl" if all(node.device.startswith("cuda") for node in self.nodes) else "gloo"

    def ask_to_stop(self, *_signal: object) -> None:
        """Stop after the current step: what a signal handler calls."""
        self.stop_asked = True

    def at_step(self, step: int) -> None:
        """Note the step that this rank works on."""
        if self.watch is not None:
            self.watch.step = step


Program = Callable[[Seat, Any], None]


def connect(host: str, port: int, *, keep: bool, patience: float) -> dist.Store:  # type: ignore[name-defined]
    """A new connection to the store at `host`:`port`; with `keep`, this process keeps the store itself."""
    limit = timedelta(seconds=max(patience, 30))
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=keep, timeout=limit, wait_for_workers=False
    )


def run_seat(seat: Seat, program: Program, order: Any) -> None:
    """Run `program` in `seat`, with the watch on; errors come out as the one error that explains them.

    Raises:
        NodeLost: the connection to another rank broke; the others' watch names the culprit.
        EvenerError: whatever else the program raises on purpose.
    """
    if seat.watch is not None:
        seat.watch.start()
    try:
        program(seat, order)
    except Exception as error:
        meaning = _meaning(error, seat)
        if seat.watch is not None and _is_of_this_rank_alone(meaning):
            seat.watch.report_failure(f"node {seat.node.name} (rank {seat.rank}) failed: {meaning}")
        if meaning is error:
            raise
        raise meaning from error
    finally:
        if seat.watch is not None:
            seat.watch.stop()


def _meaning(error: Exception, seat: Seat) -> Exception:
    """The error that tells the user what happened; `error` itself where there is nothing to add."""
    if isinstance(error, EvenerError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return DoesNotFit(
            f"node {seat.node.name} ran out of memory ({error}); use a smaller --batch-size, or --accumulate"
        )
    if seat.watch is not None and isinstance(error, RuntimeError) and _is_broken_connection(error):
        return NodeLost(f"node {seat.node.name} (rank {seat.rank}) lost its connection at step {seat.watch.step}")
    place = _place_in_users_code(error)
    if place is not None:
        return TrainingFailed(
            f"{type(error).__name__}: {error} (in {place.name}, {place.filename}, line {place.lineno})"
        )
    return error


def _is_of_this_rank_alone(error: Exception) -> bool:
    """Whether the others do not see the same error themselves, and have to be told."""
    if isinstance(error, EvenerError):
        return isinstance(error, TrainingFailed | DoesNotFit) and not isinstance(error, NonFiniteLoss)
    return True


def _place_in_users_code(error: Exception) -> traceback.FrameSummary | None:
    """Where in the user's own files `error` arose; None if it arose in ours or the libraries'."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in _NOT_THE_USERS)]
    return own[-1] if own else None


def _is_broken_connection(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in _BROKEN)


def seat_from_environment(environment: Mapping[str, str], patience: float, emit: Callable[[Any], None]) -> Seat | None:
    """The seat that torchrun gave this process; None if it was not started by it.

    Raises:
        InvalidValue: a variable is missing or not a number.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    local = _number(environment, "LOCAL_RANK")
    host, port = environment.get("MASTER_ADDR", ""), _number(environment, "MASTER_PORT")
    device = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    kept = connect(host, port, keep=rank == 0 and not agent, patience=patience)
    store = dist.PrefixStore(f"evener/{attempt}", kept)  # type: ignore[attr-defined]
    nodes = _introduce(store, rank, size, f"{socket.gethostname()} {local} {device}", patience)
    seat = Seat(rank=rank, nodes=nodes, device=torch.device(device), patience=patience, emit=emit, store=store)
    seat.address = own_address(host)
    if len({node.host for node in nodes}) > 1 and seat.address.startswith("127."):
        seat.address = own_address()  # some systems let the master's own name stand for its loopback
    if size > 1:
        own = connect(host, port, keep=False, patience=patience)
        second = dist.PrefixStore(f"evener/{attempt}", own)  # type: ignore[attr-defined]
        seat.watch = Watch(second, rank=rank, nodes=seat.names, patience=patience, on_lost=_end_process)
    return seat


def _introduce(
    store: dist.Store,  # type: ignore[name-defined]
    rank: int,
    size: int,
    name: str,
    patience: float,
) -> list[LocalNode]:
    """Leave this rank's host, number and device in the store, read the others'. Raises NodeLost if one stays away."""
    store.set(f"name/{rank}", name)
    nodes = []
    for other in range(size):
        try:
            store.wait([f"name/{other}"], timedelta(seconds=max(patience, 30)))
        except RuntimeError as error:
            raise NodeLost(f"rank {other} did not start within {max(patience, 30):g} s") from error
        host, local, device = store.get(f"name/{other}").decode().split(" ")
        nodes.append(LocalNode(name=f"{host}/{local}", host=host, device=device))
    return nodes


def _end_process(sentence: str) -> None:
    """A rank that torchrun started ends itself: its main thread may wait in a collective for ever."""
    os.write(2, f"evener: {sentence}\n".encode())
    os._exit(NodeLost.exit_code)


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except (KeyError, ValueError):
        raise InvalidValue(
            f"environment variable {name}", environment.get(name), "a number, as torchrun sets it"
        ) from None


def listen_for_signals(seat: Seat, *signals: signal.Signals) -> None:
    """From now on `signals` ask `seat` to stop after its current step."""
    for number in signals:
        signal.signal(number, seat.ask_to_stop)


def explain(error: BaseException) -> tuple[str, int, str]:
    """(sentence, exit code, traceback) of an error; the traceback is empty where the sentence says it all."""
    if isinstance(error, EvenerError):
        return str(error), error.exit_code, ""
    if isinstance(error, KeyboardInterrupt):
        return "stopped before the first step", Interrupted.exit_code, ""
    sentence = f"{type(error).__name__}: {error}"
    return sentence, EvenerError.exit_code, "".join(traceback.format_exception(error))
