"""How the nodes and the runs in progress stand, for `evener nodes`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evener.ps.config import MasterConfig
from evener.ps.nodes import Nodes
from evener.ps.status import ClusterStatus, InvitationStatus, RunStatus
from evener.ps.training_run import TrainingRun


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


def cluster_status(
    address: str,
    nodes: Nodes,
    runs: Sequence[TrainingRun],
    config: MasterConfig,
    invitations: tuple[InvitationStatus, ...],
) -> ClusterStatus:
    """How everything stands at the master of this address."""
    totals = {n: work for run in runs for n, work in run.journal.history.totals.items() if run.job.takes(n)}
    return ClusterStatus(
        address=address,
        nodes=nodes.status(totals, config.clock()),
        runs=tuple(status_of(run, config.home.runs) for run in runs),
        invitations=invitations,
    )
