"""A node starts the process of a rank of a master's run, and relays its messages; `node_rank` is that process."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import asdict

from evener.commands.rank_task import RankTask
from evener.launch.processes import RANK_MODULES, LocalProcess, LocalProcesses
from evener.ps.node.rank_session import Ending, Host, RankSetup
from evener.records.error_kind import kind_of
from evener.records.errors import first_line

_LOOK_SECONDS = 0.2


def host_of(speed: float, towards: str) -> Host:
    """Return the host of ranks on a node of this speed, whose master is at host `towards`."""
    return Host(start=partial(_Hosted, towards), speed=speed)


class _Hosted:
    """One rank's process, and the thread that receives its messages."""

    def __init__(self, towards: str, setup: RankSetup) -> None:
        job = setup.job
        self._setup = setup
        self._task = RankTask(
            config=job.config,
            task=str(setup.code / job.task) if setup.code else job.task,
            data=None if setup.data is None else str(setup.data),
            folder=str(setup.folder),
            towards=towards,
            place=msgspec.msgpack.encode(setup.place),
            process=setup.process,
            resumes=setup.resumes,
            brings_program=job.brings_program,
        )
        self._processes = LocalProcesses(RANK_MODULES)  # in this thread: the server ends with the thread that starts it
        self._started = threading.Event()
        self._one: LocalProcess | None = None
        self._is_unwanted = False
        self._thread = threading.Thread(target=self._run, name="evener-rank", daemon=True)
        self._thread.start()

    def tell(self, data: bytes) -> None:
        """Pass on a message of the coordinator; a process that could not start needs none."""
        self._started.wait()
        if self._one is not None:
            self._one.tell(data)

    def stop(self, *, at_once: bool) -> None:
        """End the process after its step, or at once."""
        self._started.wait()
        if self._one is None:
            return
        if not at_once:
            self._one.request_stop()
        elif not self._one.has_ended:
            self._one.process.kill()

    def close(self) -> None:
        """End the process, and wait for its end."""
        self._is_unwanted = True
        self._thread.join()

    def _run(self) -> None:
        """Start the process, relay its messages, and report its end, also if this machine cannot start it."""
        try:
            ending = self._hosted()
        except Exception as error:  # such as too many processes or open files
            ending = Ending(False, kind_of(error), True, f"its process could not be run: {first_line(error)}", "")
        finally:
            self._started.set()
        if not self._is_unwanted:
            self._setup.on_ended(ending)

    def _hosted(self) -> Ending:
        with self._processes as processes:
            place = self._setup.place
            one = processes.start(place.nodes[place.rank].name, _be_rank, asdict(self._task))
            self._one = one
            self._started.set()
            while not self._is_unwanted and not (one.has_ended and one.is_drained):
                for _, data in processes.receive(_LOOK_SECONDS):
                    self._setup.on_shown(data)
                while one.said:
                    self._setup.on_said(one.said.popleft())
            return _ending_of(one)


def _ending_of(one: LocalProcess) -> Ending:
    failed = one.failure
    return Ending(
        has_finished=one.has_finished,
        kind=None if failed is None else failed.kind,
        is_own=failed is not None and failed.is_own,
        sentence="" if failed is None else failed.sentence,
        clause=one.ending,
    )


def _be_rank(parent: Any, task: dict[str, Any]) -> None:
    """Run the rank in its process; only there PyTorch is loaded."""
    from evener.commands.node_rank import be_rank

    be_rank(parent, RankTask(**task))
