"""The submission of a run to a master: its name, the files for the nodes, and the run until its record is there."""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from evener.agreements.layout import Flat
from evener.commands.dashboard import page_beside
from evener.commands.doctor_nodes import code_of
from evener.commands.engines import is_thin
from evener.commands.up import open_master
from evener.config.run_config import RunConfig
from evener.data.early_data import EarlyTrial
from evener.data.tasks.load import is_path
from evener.ps.client import MasterClient
from evener.ps.protocol.blob import Blob, whole_folder
from evener.ps.protocol.job import Job
from evener.ps.protocol.rank_messages import RankJob
from evener.records.atomic import atomic_write
from evener.records.events import Phase, RunEvent
from evener.records.record import WEIGHTS, TrainRecord
from evener.records.schema import parse_noun
from evener.system.sign_of_life import sign_of_life
from evener.training.console import RunView, run_folder
from evener.training.partial_record import RunRequest

_PREPARING = Phase(what="preparing", detail="the nodes, which fetch what they need and load the model")
NO_NODE = Phase(what="waiting", detail="for a node, as none is here: type there what `evener up` says")
"""Shown when a run has been submitted and no node is present."""


class PreparedRun(NamedTuple):
    """A run that a command submits to a master.

    Attributes:
        job: of the run.
        weights: to begin with; None where the ranks make them.
        blobs: code and data for the nodes.
    """

    job: Job | RankJob
    weights: Flat | None
    blobs: Sequence[Blob]


def submit_run(
    config: RunConfig,
    prepare: Callable[[MasterClient, RunView], PreparedRun],
    *,
    to_stderr: bool,
    request: RunRequest,
    before: Iterable[RunEvent] = (),
    write_weights: Callable[[bytes, Path], object] = lambda weights, path: atomic_write(path, weights),
    with_check: Callable[[Any], Any] = lambda event: event,
) -> TrainRecord:
    """Submit a run to the master of `config` and show it; return the record, when the run's folder has all results.

    Args:
        config: of the run.
        prepare: called with the connected client.
        to_stderr: keep stdout free.
        request: for the record.
        before: events to show first.
        write_weights: writes the final weights.
        with_check: adds the result of a comparison to an event or record.

    Raises:
        EvenerError: the master refuses the run, or it ended early.
    """
    folder = run_folder(config.folder)
    with page_beside(folder, config.dashboard), RunView(folder, to_stderr=to_stderr, request=request) as view:
        view.console.quiet = config.quiet
        for event in before:
            view(event)
        view(Phase(what="joining", detail="the master and its nodes"))
        with connect_master(config) as (client, require_nodes):
            submission = prepare(client, view)
            is_first = not any_node(client)
            run = client.submit(*submission)
            view(NO_NODE if is_first else _PREPARING)
            result = client.watch(run, lambda event: view(with_check(event)), require_nodes)
        if result.weights:
            write_weights(bytes(result.weights), folder / WEIGHTS)
        if result.record:
            record = parse_noun(result.record, TrainRecord, source="the master's record")
            view(replace(with_check(record), ending=result.reason))
        if result.error is not None:
            raise result.error  # inside the view, which writes a record of what was done if there is none
    assert view.record is not None
    return view.record


def any_node(client: MasterClient) -> bool:
    """Return whether a node is present, so that a submitted run begins at once."""
    return any(node.state == "present" for node in client.ask().nodes)


def new_run_name(config: RunConfig) -> str:
    """Return the name of a run and of its folder: task, time and a random suffix."""
    plain = re.sub(r"[^A-Za-z0-9_]+", "-", Path(config.task).stem).strip("-")[:60] or "run"
    return f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def pack(config: RunConfig, say: Callable[[str], object], *, is_task: bool = True) -> tuple[dict[str, Blob], bool]:
    """Return the files for the nodes: `code`, unless the task is built in, and `data` with `--ship-data`.

    The second result is whether nodes may begin before all data have come, as a trial has shown.

    Args:
        config: of the run.
        say: shows a message while much is read.
        is_task: whether its file is a task.
    """
    blobs, trial = {}, None
    if is_path(config.task):
        blobs["code"] = code_of(config.task)
    if config.ship_data and config.data:
        root = config.data.resolve()
        files = whole_folder(root)
        if is_task and sys.platform == "linux" and not is_thin(config.task):
            trial = EarlyTrial(config.task, root, files, config.option, config.seed)
        try:
            with sign_of_life(say, "reading the data that the nodes receive"):
                blobs["data"] = Blob(root, files)
                return blobs, trial is not None and trial.succeeds()
        finally:
            if trial is not None:
                trial.close()
    return blobs, False


@contextmanager
def connect_master(config: RunConfig) -> Iterator[tuple[MasterClient, Callable[[], None]]]:
    """Connect to the master of the run; yield its client, and a check that raises when all nodes are lost."""
    if config.local_nodes is None:
        with open_master(config) as client:
            yield client, lambda: None  # nodes of a master may come back at any time
        return
    from evener.commands.private_master import local_cluster
    from evener.launch.nodes import parse_local_nodes

    with (
        local_cluster(parse_local_nodes(config.local_nodes), config.patience) as cluster,
        MasterClient(cluster.address, cluster.token, config.patience) as client,
    ):
        cluster.wait_for_nodes(client, until_measured=config.keeps_data)
        yield client, cluster.require_any_alive
