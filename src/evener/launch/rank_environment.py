"""What a rank finds when it starts, who it is and whom it works with, and how its program is run there.

The same program runs in every such environment, whether this process started its ranks itself or torchrun (Slurm,
Kubernetes, Ray through it) started them and left the standard environment variables.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evener.errors import (
    DoesNotFit,
    EvenerError,
    InvalidValue,
    NodeLost,
    NonFiniteLoss,
    TrainingFailed,
    user_frame,
)
from evener.events import RunEvent
from evener.host import own_address
from evener.launch.nodes import LocalNode
from evener.launch.rank_heartbeat import RankHeartbeat
from evener.signals import first_request

_LEAST_START_SECONDS = 30.0
_BROKEN = ("gloo/transport", "connection closed by peer", "connection reset by peer", "nccl error", "ncclsystemerror")


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
        stop_requested: whether a signal asked this process to stop.
    """

    rank: int
    nodes: list[LocalNode]
    device: torch.device
    patience: float
    notify: Callable[[Any], None]
    store: dist.Store | None = None  # type: ignore[name-defined]
    heartbeat: RankHeartbeat | None = None
    address: str = "127.0.0.1"
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
        """For tensors: NCCL if every rank has a GPU, else Gloo."""
        return "nccl" if all(node.device.startswith("cuda") for node in self.nodes) else "gloo"

    def request_stop(self) -> None:
        """Stop after the current step."""
        self.stop_requested = True

    def stop_on(self, *signals: signal.Signals) -> None:
        """From now on `signals` ask this rank to stop after its current step."""
        for number in signals:
            signal.signal(number, lambda *_: self.request_stop())

    def at_step(self, step: int) -> None:
        """Note the step that this rank works on."""
        if self.heartbeat is not None:
            self.heartbeat.step = step


Program = Callable[[RankEnvironment, Any], None]


def connect_store(host: str, port: int, *, keep: bool, patience: float) -> dist.Store:  # type: ignore[name-defined]
    """A new connection to the store at `host`:`port`; with `keep`, this process keeps the store itself."""
    limit = timedelta(seconds=max(patience, _LEAST_START_SECONDS))
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=keep, timeout=limit, wait_for_workers=False
    )


def torchrun_environment(
    variables: Mapping[str, str], patience: float, notify: Callable[[Any], None]
) -> RankEnvironment | None:
    """What torchrun left for this process; None if it was not started by it.

    Raises:
        InvalidValue: a variable is missing or not a number.
    """
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None
    rank, size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    local = _number(variables, "LOCAL_RANK")
    host, port = variables.get("MASTER_ADDR", ""), _number(variables, "MASTER_PORT")
    device = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    agent = variables.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
    prefix = f"evener/{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    kept = connect_store(host, port, keep=rank == 0 and not agent, patience=patience)
    store = dist.PrefixStore(prefix, kept)  # type: ignore[attr-defined]
    nodes = _introduce(store, rank, size, f"{socket.gethostname()} {local} {device}", patience)
    env = RankEnvironment(
        rank=rank, nodes=nodes, device=torch.device(device), patience=patience, notify=notify, store=store
    )
    env.address = own_address(host)
    if len({node.host for node in nodes}) > 1 and env.address.startswith("127."):
        env.address = own_address()  # some systems let the master's own name stand for its loopback
    if size > 1:
        own = connect_store(host, port, keep=False, patience=patience)
        second = dist.PrefixStore(prefix, own)  # type: ignore[attr-defined]
        env.heartbeat = RankHeartbeat(second, rank=rank, nodes=env.names, patience=patience, on_lost=_end_process)
    return env


def _introduce(
    store: dist.Store,  # type: ignore[name-defined]
    rank: int,
    size: int,
    name: str,
    patience: float,
) -> list[LocalNode]:
    """Leave this rank's host, number and device in the store, read the others'. Raises NodeLost if one stays away."""
    store.set(f"name/{rank}", name)
    nodes, limit = [], max(patience, _LEAST_START_SECONDS)
    for other in range(size):
        try:
            store.wait([f"name/{other}"], timedelta(seconds=limit))
        except RuntimeError as error:
            raise NodeLost(f"rank {other} did not start within {limit:g} s") from error
        host, local, device = store.get(f"name/{other}").decode().split(" ")
        nodes.append(LocalNode(name=f"{host}/{local}", host=host, device=device))
    return nodes


def _end_process(sentence: str) -> None:
    """A rank that torchrun started ends itself: its main thread may wait in a collective for ever."""
    os.write(2, f"evener: {sentence}\n".encode())
    os._exit(NodeLost.exit_code)


def _number(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except (KeyError, ValueError):
        raise InvalidValue(
            f"environment variable {name}", variables.get(name), "a number, as torchrun sets it"
        ) from None


def run_inprocess(
    program: Program, node: LocalNode, config: Any, *, patience: float, on_event: Callable[[RunEvent], None]
) -> None:
    """Run `program` on `node` here. Ctrl-C asks it to stop after its step, a second one stops it at once."""
    env = RankEnvironment(rank=0, nodes=[node], device=torch.device(node.device), patience=patience, notify=on_event)
    with first_request(env.request_stop):
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
    if isinstance(error, EvenerError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return DoesNotFit(
            f"node {env.node.name} ran out of memory ({error}); use a smaller --batch-size, or --accumulate"
        )
    if env.heartbeat is not None and isinstance(error, RuntimeError) and _is_broken_connection(error):
        return NodeLost(f"node {env.node.name} (rank {env.rank}) lost its connection at step {env.heartbeat.step}")
    place = user_frame(error)
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


def _is_broken_connection(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in _BROKEN)
