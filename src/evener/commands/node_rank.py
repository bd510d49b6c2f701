"""A rank of a master's run, in a process of its own on a node, started by `ps.node.rank_child`.

The master keeps the store of the run, and ranks reach it over their channels. Its values are signed, as in any store
(`comm.signed_store`); the master does not interpret them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import torch.distributed as dist
from msgspec.structs import fields

from evener.comm.signed_store import SignedStore
from evener.config.conflicts import MASTER_OPTIONS, THIS_MACHINE
from evener.config.run_config import RunConfig, decode_config
from evener.data.tasks.load import import_file, is_path
from evener.doctor.network import interfaces
from evener.launch.nodes import NodeSpec
from evener.launch.parent import Parent
from evener.launch.rank_environment import RankEnvironment, hosted_environment, run_rank
from evener.membership.shared_values import AskValues, SetValue, Values, decode_to_rank
from evener.ps.node.rank_child import RankTask
from evener.ps.protocol.config import return_seconds
from evener.ps.protocol.rank_messages import RankPlace
from evener.records.errors import name_below
from evener.system.awaited_files import await_files
from evener.system.cores import usable_cores
from evener.system.host import own_address
from evener.training.rank import train_rank

_USUAL = timedelta(seconds=1800)


class RankLine:
    """A rank's channel to the coordinator, for generations, answers to beats, and stored values.

    Args:
        say: sends to the coordinator, from any thread.
        hear: waits for its next message. Raises EOFError or OSError if it is gone.
    """

    def __init__(self, say: Callable[[bytes], None], hear: Callable[[], bytes]) -> None:
        self._say, self._hear = say, hear
        self._numbers = count(1)
        self._open: dict[int, SimpleQueue[Values | None]] = {}
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=self._run, name="evener-line", daemon=True).start()

    def receive(self) -> bytes:
        """Return the next message that is no answer about values; waits. Raises EOFError if the coordinator is gone."""
        message = self._messages.get()
        if message is None:
            raise EOFError
        return message

    def ask(self, make: Callable[[int], SetValue | AskValues], seconds: float) -> Values:
        """Send a request with a number and return its answer. Raises DistStoreError after `seconds`."""
        number, answer = next(self._numbers), SimpleQueue[Values | None]()
        self._open[number] = answer
        self._say(msgspec.msgpack.encode(make(number)))
        try:
            values = answer.get(timeout=seconds)
        except Empty as error:
            raise dist.DistStoreError(f"the store of the ranks did not answer for {seconds:g} s") from error
        finally:
            self._open.pop(number, None)
        if values is None:
            raise dist.DistStoreError("the store of the ranks is gone")
        return values

    def _run(self) -> None:
        try:
            while True:
                data = self._hear()
                message = decode_to_rank(data)
                if not isinstance(message, Values):
                    self._messages.put(data)
                elif (waiting := self._open.get(message.number)) is not None:
                    waiting.put(message)
        except (EOFError, OSError):
            self._messages.put(None)
            for waiting in list(self._open.values()):
                waiting.put(None)


class LineStore:
    """A store over a channel, with the interface of PyTorch's stores.

    Args:
        line: of this rank.
    """

    def __init__(self, line: RankLine) -> None:
        self._line, self._seconds = line, _USUAL.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """How long to wait for values."""
        return timedelta(seconds=self._seconds)

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        self._line.ask(lambda number: SetValue(number=number, key=key, value=value), self._seconds)

    def get(self, key: str) -> bytes:
        """Return a value, once it exists."""
        return self._values([key], self._seconds)[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all these values exist."""
        names = tuple(keys)
        answer = self._line.ask(lambda number: AskValues(number=number, keys=names, waits=False), self._seconds)
        return answer.values is not None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all these values exist."""
        self._values(keys, self._seconds if timeout is None else timeout.total_seconds())

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long to wait for values."""
        self._seconds = timeout.total_seconds()

    def _values(self, keys: Sequence[str], seconds: float) -> tuple[bytes, ...]:
        names = tuple(keys)
        answer = self._line.ask(lambda number: AskValues(number=number, keys=names, waits=True), seconds)
        assert answer.values is not None
        return answer.values


_OPTIONS_OF_A_MACHINE = {*MASTER_OPTIONS, *THIS_MACHINE, "system", "dashboard"} - {"elastic", "compile", "resume"}
_WORKERS_OF_A_CORE = 4
_MAX_ABSENCE = 8
"""Patiences within which a lost master must return; then this node must reconnect."""


def run_node_rank(parent: Parent, task: RankTask) -> None:
    """Train as a rank of a master's run."""
    place, line = task.place, RankLine(parent.say, parent.hear)
    nodes = [NodeSpec(name=n.name, host=n.host, device=n.device, speeds=((0, n.speed),)) for n in place.nodes]
    env = hosted_environment(
        parent,
        partial(_open_store, line, place.secret),
        rank=place.rank,
        nodes=nodes,
        patience=place.patience,
        process=task.process,
        is_late=place.is_late,
        receive=line.receive,
        absence=_MAX_ABSENCE * place.patience + return_seconds(place.patience),
    )
    env.address, env.has_own_paths = _address(place, task.towards), True
    env.leaving = place.leaving
    if is_path(task.task):
        name_below(Path(task.task).parent)
    if task.data is not None:
        await_files(Path(task.data))
    run_rank(env, partial(_program, brings_program=task.brings_program), _config_of(task))


def _program(env: RankEnvironment, config: RunConfig, *, brings_program: bool) -> None:
    """Run Evener's program of a rank, or the one in the task's file."""
    if brings_program:
        import_file(Path(config.task)).rank_program(env, config)
    else:
        train_rank(env, config)


def _open_store(line: RankLine, secret: bytes) -> SignedStore:
    return SignedStore(LineStore(line), secret)


def _config_of(task: RankTask) -> RunConfig:
    """Return the config of the run, with the paths of this machine: a submitter chooses no folder of it."""
    config = decode_config(task.config)
    usual = {one.name: one.default for one in fields(RunConfig) if one.name in _OPTIONS_OF_A_MACHINE}
    own: dict[str, Any] = {
        **usual,
        "task": task.task,
        "data": None if task.data is None else Path(task.data),
        "output": Path(task.folder),
        "resume": task.resumes,
        "workers": min(config.workers, _WORKERS_OF_A_CORE * usable_cores()),
    }
    return msgspec.structs.replace(config, **own)


def _address(place: RankPlace, towards: str) -> str:
    """Return the address of this machine for the other ranks, and make Gloo listen there."""
    address = own_address(towards) if towards else "127.0.0.1"
    if address.startswith("127.") and any(not node.host.startswith("127.") for node in place.nodes):
        address = own_address()
    names = [one.name for one in interfaces() if address in one.addresses]
    if names:
        os.environ["GLOO_SOCKET_IFNAME"] = names[0]
    return address
