"""Where the trials of a search run, as processes of this machine or on a master's nodes, and what is asked there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from evener.config.options import MasterAccess
from evener.config.run_config import RunConfig
from evener.launch.nodes import LocalNode, parse_local_nodes
from evener.launch.processes import LocalProcesses
from evener.records.errors import NodeLost
from evener.records.plan import Plan
from evener.records.schema import write_noun
from evener.search.local_backend import OpenRun, Runs, TrialRuns
from evener.search.options import TuneConfig
from evener.search.trial_folder import TrialFolder
from evener.search.trials import SearchTrial


@contextmanager
def open_runs(config: TuneConfig, folder: Path, notify: Callable[[str], None]) -> Iterator[Runs]:
    """What runs the trials of a search; inside, their nodes are this search's.

    Args:
        config: what was asked for.
        folder: of the study.
        notify: tells the user.

    Raises:
        EvenerError: there is no such device, or no master.
    """
    if config.is_on_master:
        with _master_runs(config, folder, notify) as runs:
            yield runs
        return
    open_run, preload = _opener(config)
    with LocalProcesses(preload) as processes:
        yield TrialRuns(processes, open_run, _nodes(config))


def run_config(
    config: TuneConfig, epochs: int, trial: SearchTrial, folder: TrialFolder, plan: Plan | None
) -> RunConfig:
    """What is asked of a trial's run; several nodes of this machine perform `plan`."""
    asked = RunConfig(
        task=config.task,
        data=config.data,
        option={**config.option, **trial.values},
        batch_size=config.batch_size,
        epochs=epochs,
        precision=config.precision,
        seed=config.seed,
        output=folder.folder,
        patience=config.patience,
        agreement=(config.agreement or "sync") if config.is_on_master else None,
        ship_data=config.ship_data,
        strategy="data" if plan is None and not config.is_on_master else "auto",
    )
    return asked if config.is_on_master else _with_checkpoints(asked, folder, plan)


def _with_checkpoints(asked: RunConfig, folder: TrialFolder, plan: Plan | None) -> RunConfig:
    if plan is not None:
        write_noun(plan, folder.team)
    return replace(
        asked,
        plan=folder.team if plan else None,
        checkpoint=folder.checkpoints,
        resume=folder.has_checkpoint,
    )


@contextmanager
def _master_runs(config: TuneConfig, folder: Path, notify: Callable[[str], None]) -> Iterator[Runs]:
    """Runs of a master; when the search is over, or ends in any other way than by losing it, its nodes are free."""
    from evener.commands.backends import load_backend
    from evener.commands.train_agreement import check_of, prepare
    from evener.commands.up import open_master
    from evener.search.master_backend import MasterRuns, Submittable

    def submittable(asked: RunConfig, is_shared: bool) -> Submittable:
        backend, task = load_backend(asked, thin=config.thin)
        job, blobs = prepare(asked, backend, task)
        if is_shared:
            check_of(asked, backend, task, job, lambda _: None)
        return Submittable(job, blobs, backend)

    access = MasterAccess(home=config.home, master=config.master, token=config.token, token_file=config.token_file)
    with open_master(access) as client:
        runs = MasterRuns(client, folder, submittable, notify)
        is_lost = False
        try:
            yield runs
        except NodeLost:
            is_lost = True
            raise
        finally:
            if not is_lost:
                runs.close()


def _nodes(config: TuneConfig) -> Sequence[LocalNode]:
    """Of this machine; a thin search has one unless the user names more."""
    if config.thin:
        return parse_local_nodes(config.local_nodes or "1.0")
    from evener.commands.train import choose_nodes

    return choose_nodes(config)


def _opener(config: TuneConfig) -> tuple[OpenRun, list[str]]:
    """What starts a trial here, and what its processes find loaded."""
    if config.thin:
        from evener.search import thin_trial as thin_runs

        return thin_runs.ThinRun, thin_runs.PRELOAD
    from evener.search import torch_trial as torch_runs

    return torch_runs.RankRun, torch_runs.PRELOAD
