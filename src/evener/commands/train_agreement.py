"""`evener train --agreement`: from what is asked for to the weights, on a master's nodes or on private local ones.

load the task -> how to agree -> pack code and data -> submit -> watch -> record and weights

`sync` promises the result of one process. Where nodes that send gradients to a master cannot give it (BatchNorm, an
optimizer of the user's own, a loss between samples), the same nodes work together as ranks, which can.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from evener.commands.backends import is_thin, load_backend, probe_of, require_twins
from evener.commands.dashboard import page_beside
from evener.commands.doctor_nodes import code_of, look_before_run, question_of
from evener.commands.submission import NO_NODE, any_node, blobs_of, new_run_name
from evener.commands.up import open_master
from evener.config.run_config import RunConfig, require_samples
from evener.data.shares import round_table
from evener.data.tasks.load import is_path
from evener.launch.nodes import relative_shares
from evener.ps.client import MasterClient
from evener.ps.node.engine import ModelBackend
from evener.ps.protocol.blob import Blob
from evener.ps.protocol.config import default_state_dir
from evener.ps.protocol.examination_messages import MAX_CODE_BYTES, TaskQuestion
from evener.ps.protocol.job import Job
from evener.ps.protocol.status import NodeStatus
from evener.ps.protocol.system import System, read_system
from evener.records.errors import InvalidInput, NeedsRanks, NodeLost, UnknownOptimizer
from evener.records.events import Phase, RunEvent
from evener.records.plan import Check, Plan
from evener.records.record import Event, TrainRecord
from evener.records.schema import parse_noun
from evener.records.task import Task, ThinTask
from evener.report.tables import summary
from evener.sync.protocol import PROTOCOLS, Outer, SyncProtocol, Workload
from evener.system.sign_of_life import sign_of_life
from evener.training.console import RunView, open_console, print_line, run_folder
from evener.training.partial_record import request_of
from evener.training.sync_check import sync_check

E = TypeVar("E", bound=RunEvent)
_APPROXIMATE = ("async", "bounded", "average", "diloco")
"""Agreements that do not promise what one process does: a node with a thin line may be told to compress."""
_LOOK_SECONDS = 0.2


def train_on_master(config: RunConfig, *, as_json: bool) -> None:
    """Train on the nodes of a master, which agree as `config` says.

    Raises:
        EvenerError: what was asked for cannot be done; or the run ended before it was complete.
    """
    try:
        backend, task = load_backend(config)
        agreed = agree(config, backend, task, to_stderr=as_json)
    except NeedsRanks as error:
        if not may_be_ranks(config):
            raise
        record = _train_as_ranks(config, error.reason, to_stderr=as_json)
    except UnknownOptimizer as error:
        if config.agreement != "sync" or not may_be_ranks(config):
            raise
        reason = f"a master cannot make the steps of the task's optimizer ({error.what})"
        record = _train_as_ranks(config, reason, to_stderr=as_json)
    else:
        record = submit(config, backend, task, to_stderr=as_json, agreed=agreed)
    if as_json:
        print_line(json.dumps(summary(record)))


class Agreed(NamedTuple):
    """A run that is ready to be submitted.

    Attributes:
        job: what has to be done.
        blobs: code and data for the nodes.
        check: comparison with one process; None where none was made.
        events: what the user has to know of the comparison.
    """

    job: Job
    blobs: list[Blob]
    check: Check | None
    events: list[RunEvent]


def agree(config: RunConfig, backend: ModelBackend, task: Task | ThinTask, *, to_stderr: bool) -> Agreed:
    """Say what has to be done, and compare a small step of two nodes with one process.

    Raises:
        InvalidInput: it cannot be done in this way.
        UnknownOptimizer: the server has no optimizer like the task's.
        NeedsRanks: nodes that agree through a master would train something else than one process.
    """
    job, blobs = prepare(config, backend, task)
    events: list[RunEvent] = []
    console = open_console(to_stderr)
    console.quiet = config.quiet
    with sign_of_life(console.print, "checking that the nodes learn what one process learns"):
        check = check_of(config, backend, task, job, events.append)
    return Agreed(job, blobs, check, events)


def may_be_ranks(config: RunConfig) -> bool:
    """Whether ranks can train in place of nodes that agree: a PyTorch task, without options of an agreement."""
    has_options = config.compress or config.robust or config.merge or config.system
    return not has_options and not is_thin(config.task)


def _train_as_ranks(config: RunConfig, reason: str, *, to_stderr: bool) -> TrainRecord:
    """Train on the same nodes, as ranks that work together; `reason`: why they cannot agree through a master.

    Raises:
        EvenerError: as `train_on_master`.
    """
    from evener.commands.train import perform  # imports PyTorch
    from evener.commands.train_on_master import submit as submit_ranks

    message = f"{reason}, so the nodes work together as ranks, which give the result of one process"
    request = request_of(config)._replace(events=(Event(step=0, kind="as ranks", message=message),))
    if config.local_nodes is not None:
        return perform(replace(config, agreement=None), to_stderr=to_stderr, request=request)
    home = None if config.master else config.home or default_state_dir(os.environ)
    ranks = replace(config, agreement=None, home=home)
    return submit_ranks(ranks, to_stderr=to_stderr, request=request)


def submit(
    config: RunConfig,
    backend: ModelBackend,
    task: Task | ThinTask,
    *,
    to_stderr: bool,
    agreed: Agreed | None = None,
) -> TrainRecord:
    """Have nodes train `task`; the record of the run, when `backend` has its weights and its folder all the rest.

    Raises:
        EvenerError: as `train_on_master`.
    """
    job, blobs, check, events = agreed or agree(config, backend, task, to_stderr=to_stderr)
    folder = run_folder(config.folder)
    request = request_of(config)
    with page_beside(folder, config.dashboard), RunView(folder, to_stderr=to_stderr, request=request) as view:
        view.console.quiet = config.quiet
        for event in events:
            view(event)
        view(Phase(what="joining", detail="the master and its nodes"))
        with connect_master(config) as (client, still_runs):
            if config.preflight and config.local_nodes is None:
                view(Phase(what="preflight", detail="looking at the machines of all nodes"))
                for finding in look_before_run(client, *_question(config)):
                    view(Event(step=0, kind="preflight", message=finding.words))
            system = await_system(config, client, view)
            if config.keeps_data:
                parts = parts_of(config.shares, client.ask().nodes, backend.num_samples, system)
                job = replace(job, workload=replace(job.workload, parts=parts))
            view(Phase(what="shipping", detail="code, weights and data" if config.ship_data else "code and weights"))
            is_first = not any_node(client)
            run = client.submit(job, backend.initial_weights(), blobs)
            if is_first:
                view(NO_NODE)
            result = client.watch(run, lambda event: view(with_check(event, check)), still_runs)
        if result.record:
            backend.write_weights(result.weights, folder / "model.safetensors")
            record = parse_noun(result.record, TrainRecord, source="the master's record")
            view(replace(with_check(record, check), ending=result.reason))
    if result.error is not None:
        raise result.error
    assert view.record is not None
    return view.record


def check_of(
    config: RunConfig, backend: ModelBackend, task: Task | ThinTask, job: Job, show: Callable[[RunEvent], None]
) -> Check | None:
    """Hold a small step of two nodes against one process; None where nobody promises that they are equal, or asked.

    Raises:
        NeedsRanks: the nodes would train something else than one process does.
    """
    is_divided = config.num_local_nodes != 1 and job.agreement.batch > 1
    if config.agreement != "sync" or not config.check or not is_divided:
        return None
    show(Phase(what="checking", detail="that the nodes learn what one process learns"))
    check = sync_check(probe_of(backend, task, config.seed), job, backend.initial_weights())
    if config.local_nodes is None and isinstance(task, Task):
        require_twins(config, task)
    if check is None:
        why = "this machine could not compute a small step, with which the nodes are held against one process"
        show(Event(step=0, kind="not checked", message=why))
    return check


def with_check(event: E, check: Check | None) -> E:
    """`event`, whose plan, if it has one, says what was checked."""
    if isinstance(event, Plan):
        return replace(event, check=check)
    return replace(event, plan=replace(event.plan, check=check)) if isinstance(event, TrainRecord) else event


def _question(config: RunConfig) -> tuple[TaskQuestion, bytes] | tuple[()]:
    """The task that nodes are to look at before the run, with their data; none where each has its own, or is sent them.

    Nor if its files are too many to travel twice.
    """
    has_own = config.ship_data or config.keeps_data
    if has_own or (is_path(config.task) and code_of(config.task).num_bytes > MAX_CODE_BYTES):
        return ()
    return question_of(config.task, config.data, config.option)


def prepare(config: RunConfig, backend: ModelBackend, task: Task | ThinTask) -> tuple[Job, list[Blob]]:
    """What has to be done, and what travels to the nodes. Raises InvalidInput if it cannot be done in this way."""
    blobs = blobs_of(config)
    return _job(config, backend, *config.sizes_of(task), blobs), list(blobs.values())


def _job(config: RunConfig, backend: ModelBackend, batch_size: int, epochs: int, blobs: dict[str, Blob]) -> Job:
    """What has to be done. Raises InvalidInput if it cannot be done in this way."""
    require_samples(batch_size, backend.num_samples)
    steps = epochs * -(-backend.num_samples // batch_size)
    return Job(
        run=new_run_name(config),
        task=Path(config.task).name if "code" in blobs else config.task,
        title=backend.name,
        data_dir=str(config.data.resolve()) if config.data else "",
        options=config.option,
        precision=config.precision,
        protocol=config.agreement or "",
        agreement=agreement_of(
            config, lambda: backend.server_optimizer(steps), clip_norm=backend.clip_norm, batch=batch_size
        ),
        workload=Workload(num_samples=backend.num_samples, num_epochs=epochs, seed=config.seed),
        layout=backend.layout,
        fixed_sum=backend.fixed_sum,
        num_validation=backend.num_validation,
        has_accuracy=backend.has_accuracy,
        code=blobs["code"].digest if "code" in blobs else "",
        data=blobs["data"].digest if "data" in blobs else "",
    )


def await_system(config: RunConfig, client: MasterClient, show: Callable[[Phase], None]) -> System | None:
    """The system that `config` names, when all its nodes are here; None if it names none.

    Raises:
        NodeLost: some do not come within the patience.
    """
    if config.system is None:
        return None
    system, until = read_system(config.system), time.monotonic() + config.patience
    told: list[str] = []
    while missing := system.missing([node.name for node in client.ask().nodes if node.state == "present"]):
        if missing != told:
            show(Phase(what="waiting", detail=f"for {', '.join(missing)} of {system.file}"))
            told = missing
        if time.monotonic() > until:
            raise NodeLost(
                f"{', '.join(missing)} of {system.file} did not join within {config.patience:g} s: "
                "type there what `evener up` says, or take them out of the file",
                missing,
            )
        time.sleep(_LOOK_SECONDS)
    return system


def parts_of(
    shares: str, nodes: Sequence[NodeStatus], num_samples: int, system: System | None = None
) -> tuple[tuple[str, int], ...]:
    """Whose are how many samples of data that stay: by the scores of the system or the nodes, or as `--shares` says.

    Raises:
        InvalidInput: nobody is here, or `shares` is of other nodes.
    """
    scores = {node.name: (system.score(node.name) if system else None) or node.score for node in nodes}
    here = [node for node in nodes if node.state == "present" and scores[node.name]]
    if not here:
        raise InvalidInput("data stay with the nodes that are here, and there are none: let them join first")
    weights = relative_shares(shares, len(here)) or [scores[node.name] or 0.0 for node in here]
    sizes = round_table([num_samples], weights)[0].tolist()
    return tuple((node.name, size) for node, size in zip(here, sizes, strict=True) if size)


def agreement_of(config: RunConfig, outer: Callable[[], Outer], *, clip_norm: float | None, batch: int) -> SyncProtocol:
    """How the nodes agree; what the user did not say is as the protocol has it.

    Args:
        config: what was asked for.
        outer: gives the optimiser that does as the task's, where the server makes the steps.
        clip_norm: the task's bound on the norm of the gradient.
        batch: samples.

    Raises:
        InvalidInput: the server cannot do as the task's optimiser does.
    """
    steps = config.local_steps
    knobs: dict[str, Any] = {
        "outer": outer() if config.agreement in ("sync", "async", "bounded") else None,
        "staleness": config.staleness,
        "fraction": config.fraction,
        "local_steps": int(steps) if steps is not None and steps != "epoch" else steps,
        "learning_rate": config.outer_lr,
        "momentum": config.outer_momentum,
    }
    given = {name: value for name, value in knobs.items() if value is not None}
    agreement = PROTOCOLS[config.agreement or ""](batch=batch, **given)
    compression = config.compress or "none"
    robust = config.robust or agreement.robust
    return replace(
        agreement,
        push=compression,
        pull=compression,
        thin="int8" if config.compress is None and config.agreement in _APPROXIMATE else "none",
        is_overlapped=config.overlap,
        robust=robust,
        merge=config.merge or agreement.merge,
        clip_norm=clip_norm if agreement.contribution == "gradient" else None,
    )


@contextmanager
def connect_master(config: RunConfig) -> Iterator[tuple[MasterClient, Callable[[], None]]]:
    """The master that is to do it, and a check that somebody is left to do it."""
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
        yield client, cluster.check_any
