"""Opens the runner that runs the trials of a search, and configures each trial's run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from evener.config.options import MasterAccess
from evener.config.run_config import RunConfig
from evener.launch.nodes import NodeSpec, parse_local_nodes
from evener.launch.processes import RANK_MODULES, LocalProcesses
from evener.records.errors import NodeLost
from evener.records.plan import Plan
from evener.records.record import WEIGHTS
from evener.records.schema import write_noun
from evener.search.local_runner import LocalRunner, OpenTrial, TrialRunner
from evener.search.options import TuneConfig
from evener.search.trial_folder import TrialFolder
from evener.search.trials import SearchTrial

if TYPE_CHECKING:
    from evener.ps.node.engine import ModelBackend
    from evener.search.master_runner import Submittable


@contextmanager
def open_runner(config: TuneConfig, folder: Path, notify: Callable[[str], None]) -> Iterator[TrialRunner]:
    """Yield the runner for the trials of a search, which owns its nodes until the block ends.

    Args:
        config: configuration of the search.
        folder: folder of the study.
        notify: shows a message to the user.

    Raises:
        EvenerError: a requested device or the master does not exist.
    """
    if config.is_on_master:
        with open_master_runner(config, folder, notify, _preparer(config)) as runner:
            yield runner
        return
    open_trial, preload = _opener(config)
    with LocalProcesses(preload) as processes:
        yield LocalRunner(processes, open_trial, _local_nodes(config))


def run_config(
    config: TuneConfig, epochs: int, trial: SearchTrial, folder: TrialFolder, plan: Plan | None
) -> RunConfig:
    """Return the configuration of a trial's run; several nodes of this machine perform `plan`."""
    run = RunConfig(
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
    if config.is_on_master:
        return run
    if plan is not None:
        write_noun(plan, folder.team)
    return replace(
        run,
        plan=folder.team if plan else None,
        checkpoint=folder.checkpoints,
        resume=folder.has_checkpoint,
    )


def _preparer(config: TuneConfig) -> Callable[[RunConfig, bool], Submittable]:
    """Return the function that prepares a trial of a task for a master."""
    from evener.commands.engines import load_backend
    from evener.commands.train_by_agreement import check_of, prepare
    from evener.search.master_runner import Submittable

    def submittable(run: RunConfig, is_shared: bool) -> Submittable:
        backend, task = load_backend(run, thin=config.thin)
        job, blobs = prepare(run, backend, task)
        if is_shared:
            check_of(run, backend, task, job, lambda _: None)
        save = partial(_write_weights, backend, run.folder / WEIGHTS)
        return Submittable(job, blobs, run.epochs or 0, backend.initial_weights, save)

    return submittable


def _write_weights(backend: ModelBackend, path: Path, weights: bytes) -> None:
    backend.write_weights(weights, path)


@contextmanager
def open_master_runner(
    config: TuneConfig, folder: Path, notify: Callable[[str], None], prepare: Callable[[Any, bool], Submittable]
) -> Iterator[TrialRunner]:
    """Yield the runner of a master, and free its nodes at the end unless the master was lost.

    Args:
        config: configuration of the search.
        folder: folder of the study.
        notify: shows a message to the user.
        prepare: prepares a trial's run for submission; its second argument says whether several nodes share it.

    Raises:
        EvenerError: the master does not exist.
    """
    from evener.commands.up import open_master
    from evener.search.master_runner import MasterRunner

    access = MasterAccess(home=config.home, master=config.master, token=config.token, token_file=config.token_file)
    with open_master(access) as client:
        trials = MasterRunner(client, folder, prepare, notify)
        is_lost = False
        try:
            yield trials
        except NodeLost:
            is_lost = True
            raise
        finally:
            if not is_lost:
                trials.close()


def _local_nodes(config: TuneConfig) -> Sequence[NodeSpec]:
    """Return the nodes of this machine; a search without PyTorch has one unless the user names more."""
    if config.thin:
        return parse_local_nodes(config.local_nodes or "1.0")
    from evener.commands.train import choose_nodes

    return choose_nodes(config)


def _opener(config: TuneConfig) -> tuple[OpenTrial, Sequence[str]]:
    """Return the function that starts a trial on this machine, and the modules that its processes preload."""
    if config.thin:
        from evener.search import thin_trial

        return thin_trial.ThinTrial, thin_trial.PRELOAD
    from evener.search import torch_trial

    return torch_trial.TorchTrial, RANK_MODULES
