"""How the nodes and the runs in progress stand, for `evener nodes`; and what is said of a run that cannot go on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evener.ps.master.collective.collective_run import CollectiveRun
from evener.ps.master.nodes import Nodes
from evener.ps.master.training_run import TrainingRun
from evener.ps.protocol.config import MasterConfig
from evener.ps.protocol.status import ClusterStatus, InvitationStatus, RunStatus
from evener.records.errors import first_line
from evener.records.schema import shown


def status_of(run: TrainingRun, folder: Path) -> RunStatus:
    """How a run stands, whose results will lie in `folder`, in one of its own."""
    validations = run.journal.history.validations
    return RunStatus(
        run=run.job.run,
        task=run.job.title,
        protocol=run.job.protocol,
        version=run.server.version,
        epoch=run.journal.history.epoch,
        epochs=run.job.workload.num_epochs,
        loss=run.journal.history.loss,
        accuracy=validations[-1].accuracy if validations else None,
        folder=str(folder / run.job.run),
        submitter=run.job.submitter,
        nodes=run.job.nodes,
    )


def status_of_ranks(run: CollectiveRun, folder: Path) -> RunStatus:
    """The same, of a run whose ranks work together."""
    news = run.news
    return RunStatus(
        run=run.job.run,
        task=run.job.title,
        protocol=f"strategy {news.plan.strategy}" if news.plan else "ranks that work together",
        version=run.num_updates,
        epoch=news.step.epoch if news.step else 0,
        epochs=(news.phase.epochs or None) if news.phase else None,
        loss=(news.step.loss or 0.0) if news.step else 0.0,
        accuracy=news.validation.accuracy if news.validation else None,
        folder=str(folder / run.job.run),
        submitter=run.job.submitter,
        checkpoint=run.checkpoints.last.step,
    )


def busy_with(run: RunStatus) -> str:
    """Why a master has no room for another run."""
    return (
        f"the master is busy with run {run.run}, {run.version} updates so far: wait for it (`evener nodes` shows it, "
        f"its results will be in {run.folder}), or end it with `evener stop`"
    )


def cluster_status(
    address: str,
    nodes: Nodes,
    runs: Sequence[TrainingRun],
    ranks: CollectiveRun | None,
    config: MasterConfig,
    invitations: tuple[InvitationStatus, ...],
) -> ClusterStatus:
    """How everything stands at the master of this address."""
    totals = {n: work for run in runs for n, work in run.journal.history.totals.items() if run.job.takes(n)}
    return ClusterStatus(
        address=address,
        nodes=nodes.status(totals, config.clock()),
        runs=(
            *(status_of(run, config.home.runs) for run in runs),
            *(() if ranks is None else (status_of_ranks(ranks, config.home.runs),)),
        ),
        invitations=invitations,
    )


def set_aside_sentence(run: str, error: Exception) -> str:
    """Why a run was set aside: something at the master, not of the run, went wrong."""
    return shown(f"{run} cannot be gone on with ({type(error).__name__}: {first_line(error)})")
