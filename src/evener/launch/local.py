"""Starts one process a node on this machine, relays what they say, and never leaves one behind.

The processes are forked from a server that has PyTorch loaded already, so that the second run of a demo starts at once.
Whichever way a run ends, this process names who failed first-hand: a rank that only lost its connection is not it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist

from evener.errors import EvenerError, Interrupted, NodeLost
from evener.launch.messages import Failed, Finished, Said, Word, decode, encode, heard, say
from evener.launch.nodes import LocalNode
from evener.launch.parent import end_with_parent
from evener.launch.seat import Program, Seat, connect, explain, listen_for_signals, run_seat
from evener.launch.watch import Watch, last_step
from evener.signals import requests_to_stop, sigterm_is_ctrl_c

_HOST = "127.0.0.1"
_GRACE = 1.0
_PRELOAD = ["torch", "torch.distributed", "torch.nn.parallel", "evener.run.rank"]


@dataclass
class _Rank:
    process: ForkServerProcess
    pipe: Connection
    finished: bool = False
    silent: bool = False
    failure: Failed | None = field(default=None)

    @property
    def ended(self) -> bool:
        return not self.process.is_alive()


def run_local(
    program: Program,
    nodes: Sequence[LocalNode],
    order: Any,
    *,
    patience: float,
    on_word: Callable[[Word], None],
) -> None:
    """Run `program` once a node, each in a process of its own, to the end.

    Args:
        program: module-level function of a seat and `order`.
        nodes: one a rank.
        order: what to do; a plain value.
        patience: seconds of silence after which a rank is given up.
        on_word: called with everything that a rank says.

    Raises:
        EvenerError: of the rank that failed first-hand, with its exit code; all processes have ended by then.
        Interrupted: Ctrl-C; the ranks were asked to stop after their step and write a checkpoint.
    """
    with _store() as (store, port), sigterm_is_ctrl_c(), _end_all() as ranks:
        for rank in range(len(nodes)):
            ranks.append(_start(program, rank, list(nodes), order, port, patience))
        _relay(ranks, store, nodes, on_word, patience)


@contextlib.contextmanager
def _store() -> Iterator[tuple[Any, int]]:
    """A store that listens on the loopback interface only, and its port."""
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            _HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )
    yield store, port
    del store


@contextlib.contextmanager
def _end_all() -> Iterator[list[_Rank]]:
    """A list of ranks that are all ended on the way out, whatever happens."""
    ranks: list[_Rank] = []
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join()
            rank.pipe.close()
            rank.process.close()


def _start(program: Program, rank: int, nodes: list[LocalNode], order: Any, port: int, patience: float) -> _Rank:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    mine, its = context.Pipe(duplex=False)
    process = context.Process(
        target=_rank_main, args=(program, rank, nodes, order, port, patience, its), name=nodes[rank].name
    )
    process.start()
    its.close()
    return _Rank(process=process, pipe=mine)


def _rank_main(
    program: Program, rank: int, nodes: list[LocalNode], order: Any, port: int, patience: float, pipe: Connection
) -> None:
    """What a rank's process runs; it ends here, never by returning: a Gloo thread may crash an ordinary exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    node = nodes[rank]
    if node.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, node.cores)
    if node.threads:
        torch.set_num_threads(node.threads)
    seat = Seat(
        rank=rank,
        nodes=nodes,
        device=torch.device(node.device),
        patience=patience,
        emit=lambda word: pipe.send_bytes(say(word)),
        store=connect(_HOST, port, keep=False, patience=patience),
    )
    listen_for_signals(seat, signal.SIGTERM)

    def lost(sentence: str) -> None:
        pipe.send_bytes(encode(Failed("others", NodeLost.exit_code, sentence)))
        os._exit(NodeLost.exit_code)

    second = connect(_HOST, port, keep=False, patience=patience)
    seat.watch = Watch(second, rank=rank, nodes=seat.names, patience=patience, on_lost=lost)
    end_with_parent()
    code = 0
    try:
        run_seat(seat, program, order)
        pipe.send_bytes(encode(Finished()))
    except BaseException as error:
        sentence, code, trace = explain(error)
        cause: Any = "others" if isinstance(error, NodeLost) else "own"
        with contextlib.suppress(OSError):
            pipe.send_bytes(encode(Failed(cause, code, sentence, trace)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _relay(
    ranks: Sequence[_Rank],
    store: Any,
    nodes: Sequence[LocalNode],
    on_word: Callable[[Word], None],
    patience: float,
) -> None:
    """Pass on what the ranks say until all have ended. Raises the error of the rank that failed first-hand."""
    deadline: float | None = None
    asked = False
    with requests_to_stop() as requests:
        while not all(rank.ended and rank.silent for rank in ranks):
            _read(ranks, on_word, timeout=0.2)
            failed = [r for r in ranks if r.failure or (r.ended and not r.finished)]
            if failed and deadline is None:
                own = any(r.failure and r.failure.cause == "own" for r in failed)
                deadline = time.monotonic() + (_GRACE if not asked else patience) * (0.5 if own else 1.0)
            if deadline is not None and time.monotonic() > deadline:
                break
            if len(requests) > 1:
                raise Interrupted("stopped at once; the last checkpoint is kept")
            if requests and not asked:
                asked, deadline = True, time.monotonic() + max(patience, _GRACE)
                _ask_to_stop(ranks)
    _raise_first(ranks, store, nodes, asked)


def _read(ranks: Sequence[_Rank], on_word: Callable[[Word], None], timeout: float) -> None:
    open_pipes = {rank.pipe: rank for rank in ranks if not rank.silent}
    sentinels = [rank.process.sentinel for rank in ranks if not rank.ended]
    for ready in wait([*open_pipes, *sentinels], timeout):
        rank = open_pipes.get(ready)  # type: ignore[call-overload]
        if rank is None:
            continue
        try:
            message = decode(rank.pipe.recv_bytes())
        except (EOFError, OSError):
            rank.silent = True
            continue
        if isinstance(message, Said):
            on_word(heard(message))
        elif isinstance(message, Failed):
            rank.failure = message
        else:
            rank.finished = True


def _ask_to_stop(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        if rank.process.pid is not None and not rank.ended:
            os.kill(rank.process.pid, signal.SIGTERM)


def _raise_first(ranks: Sequence[_Rank], store: Any, nodes: Sequence[LocalNode], asked: bool) -> None:
    """Raise what explains the end of the run best: an own failure, then a death, then a lost connection."""
    for rank in ranks:
        if rank.failure is not None and rank.failure.cause == "own":
            raise _error(rank.failure)
    for i, rank in enumerate(ranks):
        if rank.ended and not rank.finished and rank.failure is None:
            raise NodeLost(_obituary(i, nodes[i], rank.process.exitcode, last_step(store, i)))
    for rank in ranks:
        if rank.failure is not None:
            raise _error(rank.failure)
    if asked and not all(rank.finished for rank in ranks):
        raise Interrupted("stopped; a rank did not end in time, the last checkpoint is kept")


def _error(failure: Failed) -> EvenerError:
    if failure.traceback:
        sys.stderr.write(failure.traceback)
    error = EvenerError(failure.sentence)
    error.exit_code = failure.exit_code
    return error


def _obituary(rank: int, node: LocalNode, code: int | None, step: int) -> str:
    if code is not None and code < 0:
        how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
    else:
        how = f"ended with exit code {code}"
    return f"node {node.name} (rank {rank}) {how} at step {step}"
