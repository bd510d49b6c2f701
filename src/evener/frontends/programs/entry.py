"""The entry of a program into its run, which `evener run`, torchrun or srun started; without one it runs alone.

`evener.join` and `evener.gather` are these functions.
"""

from __future__ import annotations

import atexit
import dis
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from torch import Tensor

from evener.comm.group import Group
from evener.comm.joining import leave_group
from evener.comm.message_topics import END
from evener.comm.step_timing import StepTimer
from evener.frontends.programs.accelerate_alone import hide_torchrun, leave_others_group
from evener.frontends.programs.cpu_check import MAX_RANKS, shares_of_check
from evener.frontends.programs.options import ScriptConfig
from evener.frontends.programs.run import Run
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment, explained
from evener.launch.slurm import adopt_slurm
from evener.launch.torchrun import say_what_is_waited_for, say_where_the_run_is_shown, torchrun_environment
from evener.records.errors import DoesNotFit, EvenerError, InvalidInput, NodeLost, TrainingFailed, exit_code_of, explain
from evener.records.events import Phase, RunEvent
from evener.system import accelerators
from evener.system.process_exit import exit_now
from evener.system.signals import outlive_terminal
from evener.training.console import RunView, run_folder
from evener.training.context import join_world
from evener.training.partial_record import RunRequest

_runs: list[Run] = []
"""The run of this process, once it has joined."""
_waiting: list[tuple[RankEnvironment, ScriptConfig]] = []
"""Environment and config of this process, until it joins."""
_taken: list[tuple[RankEnvironment, ScriptConfig]] = []
"""Environment and config of this process, once a front end of its own has taken them."""


def join() -> Run:
    """Join the nodes that run this program; every node calls this once, before it makes its model.

    Returns:
        A run of one node if the program was started alone; it then behaves as without Evener.

    Raises:
        NodeLost: a node does not join in time.
    """
    if not _runs:
        _runs.append(_joined())
    return _runs[0]


def gather(rows: Tensor) -> Tensor:
    """Return the rows of all nodes, in the order of the batch, for losses and layers that compare samples.

    Gradients flow back to the nodes that the rows came from. Every node calls this; alone it is the identity.

    Args:
        rows: (samples, ...), of this node's part of the batch; the number of rows may differ from node to node.
    """
    return _runs[0].gather(rows) if _runs else rows


def expect(env: RankEnvironment, config: ScriptConfig) -> None:
    """Let the program that this process runs next join as the rank of `env`."""
    _runs.clear()
    _taken.clear()
    _waiting[:] = [(env, config)]


def take_environment() -> tuple[RankEnvironment, ScriptConfig] | None:
    """Return environment and options of this rank to a front end that trains in its own way; None if it is no rank.

    Raises:
        InvalidInput: the program has joined already, or has trained in this way before.
    """
    if not _waiting:
        if _runs or _taken:
            raise InvalidInput(
                "a program that `evener run` started joins its nodes once: train in a program of its own"
            )
        return None
    _taken.append(_waiting.pop())
    return _taken[0]


def is_rank() -> bool:
    """Return whether `evener run` started this program as a rank, which may join its nodes or has done so."""
    return bool(_waiting) or has_joined()


def has_joined() -> bool:
    """Return whether the program of this process has joined the nodes, by `join` or by a front end of its own."""
    return bool(_runs or _taken)


def joined() -> Run | None:
    """Return the run of this process; None if its program has not joined."""
    return _runs[0] if _runs else None


def _joined() -> Run:
    if _waiting:
        env, config = _waiting.pop()
        return _checked_on_cpus(Run(env, join_world(env, preflight=config.preflight), config), config)
    adopt_slurm(os.environ)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _join_torchrun()
    device = accelerators.best()
    env = RankEnvironment(0, [NodeSpec(name="node-0", device=str(device))], device, 0.0, lambda _: None)
    return Run(env, Group(rank=0, size=1, device=device, nodes=["node-0"], timer=StepTimer(device)), None)


def _checked_on_cpus(run: Run, config: ScriptConfig) -> Run:
    """Return `run`, after starting the check of its program on CPUs if it uses accelerators."""
    size = min(run.size, MAX_RANKS)
    options = ["--shares", shares_of_check(config.shares, size), "--strategy", config.strategy]
    options += ["--patience", str(config.patience), *(["--approximate"] if config.approximate else [])]

    def command(folder: Path) -> list[str]:
        nodes = ("--local-nodes", ",".join(["1"] * size), "--run-folder", str(folder / "run"))
        return ["-m", "evener", "run", *nodes, *options, str(config.script), *config.arguments]

    run.equivalence_check.begin_on_cpus(command)
    return run


def _join_torchrun() -> Run:
    """Join as one of the ranks that torchrun started."""
    config = ScriptConfig(script=Path(sys.argv[0]), arguments=tuple(sys.argv[1:]))
    sys.excepthook = _fail_to_join
    views: list[RunView] = []

    def show(event: RunEvent) -> None:
        for view in views:
            view(event)

    leave_others_group()
    say_what_is_waited_for(os.environ)
    env = torchrun_environment(os.environ, config.patience, show)
    assert env is not None
    say_where_the_run_is_shown(env)
    if env.rank == 0:
        request = RunRequest(config.script.stem, options={"--shares": config.shares}, file=config.script.name)
        views.append(RunView(run_folder(config.folder), to_stderr=True, by_lines=True, request=request))
        env.end = views[0].end_process
        show(Phase(what="starting", detail="the nodes"))
    hide_torchrun()
    env.stop_on(signal.SIGTERM, signal.SIGHUP)
    outlive_terminal()
    env.start_watching()
    run = _checked_on_cpus(Run(env, join_world(env, preflight=config.preflight), config), config)
    ending = _Ending(run, env, views, config.script.name)
    sys.excepthook, sys.exit = ending.fail, ending.exit
    atexit.register(ending.finish)
    return run


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print one sentence, or the traceback of the program's own error."""
    if isinstance(error, EvenerError):
        sys.stderr.write(f"evener: {explain(error)[0]}\n")
    else:
        sys.__excepthook__(kind, error, trace)
    sys.stderr.flush()


def _fail_to_join(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the error of a program that has not joined, and exit."""
    _print_error(kind, error, trace)
    os._exit(exit_code_of(error))


class _Ending:
    """The end of a program under torchrun, where no Evener process remains to report it.

    Args:
        run: of the program.
        env: of this rank.
        views: of the run.
        script: name of the program.
    """

    def __init__(self, run: Run, env: RankEnvironment, views: Sequence[RunView], script: str) -> None:
        self._run, self._env, self._views, self._script = run, env, views, script
        self._main = _outermost_frame()
        self._code: object = None
        self._has_failed = False

    def exit(self, code: object = None, /) -> NoReturn:
        """Note the exit code of the program; in place of `sys.exit`."""
        self._code = code
        raise SystemExit(code)

    def fail(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report the error to the user and to the other ranks, and exit."""
        self._has_failed = True
        self._run.equivalence_check.abandon()
        if self._run.equivalence_check.replica is not None:
            self._run.equivalence_check.replica.fail(error)
        meaning = explained(error, self._env) if isinstance(error, Exception) else error
        if isinstance(meaning, NodeLost | InvalidInput | DoesNotFit):
            error = meaning
        sentence, code = explain(error)[0], exit_code_of(meaning)
        _print_error(kind, error, trace)
        for view in self._views:
            view.end(error if isinstance(error, EvenerError | KeyboardInterrupt) else TrainingFailed(sentence))
        self._env.report_failure(error)
        self._env.stop_watching()
        if isinstance(error, NodeLost):
            os._exit(code)
        exit_now(code)

    def finish(self) -> None:
        """Write the record, and exit with the program's code; every rank calls this at the end."""
        if self._has_failed:
            return
        try:
            if self._code not in (None, 0) and not _has_returned(self._main):  # else the program caught its SystemExit
                raise TrainingFailed(f"{self._script} ended itself: exit code {self._code}")
            finish(self._run, self._env)
        except BaseException as error:
            self.fail(type(error), error, error.__traceback__)
        for view in self._views:
            view.end(None)
        self._env.stop_watching()
        atexit.unregister(self.finish)
        if _has_returned(self._main):
            exit_now(0)  # else Python exits with the code of the SystemExit that the program has raised


def _outermost_frame() -> FrameType:
    """Return the frame of this program's first line of code."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _has_returned(frame: FrameType) -> bool:
    """Return whether a frame that is over has returned, instead of being left by an exception."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def end_copy(run: Run | None, error: BaseException | None) -> None:
    """End a forked replica whose program has ended or failed; without effect in a rank."""
    if run is None or run.equivalence_check.replica is None:
        return
    if error is None:
        run.equivalence_check.replica.end()
    run.equivalence_check.replica.fail(error)


def finish(run: Run, env: RankEnvironment, **fields: Any) -> None:
    """Write the record, with `fields` that override its own. Every rank calls this at the end of its program."""
    end_copy(run, None)
    run.group.barrier(END)
    record: Any = run.finish(**fields)
    if record is not None and run.group.is_leader:
        env.notify(record)
    run.group.barrier()
    leave_group()
