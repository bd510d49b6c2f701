"""`evener run`: the user's program on every node."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout

from evener.commands.train import choose_nodes, end_torchrun_rank, is_torchrun, run_on_nodes, run_torchrun_rank
from evener.frontends.programs import entry
from evener.frontends.programs.cpu_check import begin_cpu_check, is_cpu_check, yield_memory
from evener.frontends.programs.forked_replica import end_with_parent
from evener.frontends.programs.options import ScriptConfig
from evener.launch.rank_environment import RankEnvironment
from evener.records.errors import InvalidInput, TrainingFailed
from evener.report.tables import summary
from evener.training.console import RunView, print_line, run_folder
from evener.training.partial_record import RunRequest


def run_program(config: ScriptConfig, *, as_json: bool) -> None:
    """Run as a rank if torchrun started this process, else on nodes of this machine."""
    if is_cpu_check():
        end_with_parent()
        yield_memory()
    options, folder = {"--shares": config.shares}, run_folder(config.folder)
    request = RunRequest(config.script.stem, options=options, file=config.script.name)
    is_leader = not is_torchrun(config) or os.environ["RANK"] == "0"
    with RunView(folder, to_stderr=True, by_lines=True, request=request, is_leader=is_leader) as view:
        if is_torchrun(config):
            run_torchrun_rank(perform_script, config, view)
        else:
            run_on_nodes(perform_script, config, view, choose_nodes(config) if config.local_nodes else None)
    if as_json and view.record is not None:
        print_line(json.dumps(summary(view.record)))
    if is_torchrun(config):
        end_torchrun_rank()


def perform_script(env: RankEnvironment, config: ScriptConfig) -> None:
    """Run one rank: the program, then its record.

    Raises:
        InvalidInput: there are several nodes, and the program did not join them.
        TrainingFailed: the program exits with a non-zero code.
    """
    entry.expect(env, config)
    if is_cpu_check():
        begin_cpu_check()
    with ExitStack() as stack:
        if env.rank > 0:  # all ranks print the same
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w", encoding="utf-8"))))
        stack.enter_context(_as_main(config))
        stack.push(_end_copy)
        try:
            runpy.run_path(str(config.script), run_name="__main__")
        except SystemExit as error:
            if error.code not in (None, 0):
                raise TrainingFailed(f"{config.script.name} ended itself: exit code {error.code}") from error
    run = entry.joined()
    if run is None:
        if len(env.nodes) > 1 and not entry.has_joined():
            raise InvalidInput(
                f"{config.script} ran {len(env.nodes)} times, each node for itself: let it call evener.join(), and "
                "run.prepare with its model, optimizer and loader"
            )
        return
    entry.finish(run, env)


def _end_copy(_kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
    """End a forked replica whose program has ended or failed."""
    entry.end_copy(entry.joined(), error)


@contextmanager
def _as_main(config: ScriptConfig) -> Iterator[None]:
    """Set arguments and paths inside as if Python had started the program."""
    argv, path = sys.argv, sys.path[:]
    sys.argv = [str(config.script), *config.arguments]
    sys.path.insert(0, str(config.script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
