"""States of the nodes and the runs of a master, for `evener nodes`; reasons why a run could not begin or continue."""

from __future__ import annotations

from collections.abc import Sequence

from evener.ps.master.active_run import ActiveRun
from evener.ps.master.nodes import Nodes
from evener.ps.protocol.config import MasterConfig
from evener.ps.protocol.status import ClusterStatus, InvitationStatus, RunStatus
from evener.records.errors import first_line
from evener.records.schema import shown


def busy_with(run: RunStatus) -> str:
    """Say why a master has no room for another run."""
    return (
        f"the master is busy with run {run.run}, {run.version} updates so far: wait for it (`evener nodes` shows it, "
        f"its results will be in {run.folder}), or end it with `evener stop`"
    )


def cluster_status(
    address: str,
    nodes: Nodes,
    runs: Sequence[ActiveRun],
    config: MasterConfig,
    invitations: tuple[InvitationStatus, ...],
) -> ClusterStatus:
    """Return the state of the master at `address`."""
    works = {name: work for run in runs for name, work in run.works.items() if run.job.takes(name)}
    return ClusterStatus(
        address=address,
        nodes=nodes.status(works, config.clock()),
        runs=tuple(run.status for run in runs),
        invitations=invitations,
    )


def set_aside_sentence(run: str, error: Exception) -> str:
    """Say why a run was set aside: an error at the master, not of the run."""
    return shown(f"{run} cannot be continued ({type(error).__name__}: {first_line(error)})")
