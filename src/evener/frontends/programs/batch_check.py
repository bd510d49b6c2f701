"""The comparison of a BatchTask on accelerators: it is begun once more by ranks on CPUs (`cpu_check`)."""

from __future__ import annotations

import pickle
from pathlib import Path

from msgspec.structs import replace

from evener.commands.pickled import with_pickled_task
from evener.commands.train import run_on_nodes
from evener.config.run_config import RunConfig
from evener.frontends.programs.cpu_check import MAX_RANKS, shares_of_check, yield_memory
from evener.frontends.programs.forked_replica import end_with_parent
from evener.frontends.programs.run import Run
from evener.launch.rank_environment import RankFunction
from evener.records.errors import EvenerError
from evener.records.task import BatchTask


def begin_batch_check(run: Run, program: RankFunction, config: RunConfig, task: BatchTask | None) -> None:
    """Start the check if `run` is on accelerators, and this is its first rank.

    Args:
        run: of the ranks that train.
        program: of a rank; gets its environment, the config and, unless it is named, the task.
        config: options of the run.
        task: to be trained; None for the task that `config` names.
    """
    size = min(run.size, MAX_RANKS)
    checked = replace(
        config,
        local_nodes=",".join(["1"] * size),
        devices="all",
        memory=None,
        shares=shares_of_check(config.shares, size),
        elastic=False,
        checkpoint=None,
        checkpoint_every=None,
        resume=False,
        keeps_checkpoints=False,
        agreement=None,
        home=None,
        master=None,
    )

    def command(folder: Path) -> list[str]:
        file = folder / "task"
        begun = replace(checked, output=folder / "run")
        file.write_bytes(pickle.dumps((program if task is None else with_pickled_task(program, task), begun)))
        return ["-c", f"import {__name__} as check; check.run_batch_check({str(file)!r})"]

    run.equivalence_check.begin_on_cpus(command)


def run_batch_check(file: str) -> None:
    """Run the check, in the process that starts its ranks."""
    end_with_parent()
    yield_memory()
    program, config = pickle.loads(Path(file).read_bytes())
    try:
        run_on_nodes(program, config, lambda _: None)
    except EvenerError as error:
        raise SystemExit(f"evener: {error}") from error
