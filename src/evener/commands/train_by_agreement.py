"""`evener train --agreement`: train on a master's nodes or on private local ones.

load the task -> choose the settings of the agreement -> pack code and data -> submit -> watch -> record and weights

`sync` promises the result of one process. Where gradients sent to a master cannot give it (BatchNorm, a custom
optimizer, a loss between samples), the same nodes train as ranks, which can.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from evener.agreements.settings import AGREEMENT_SETTINGS, AgreementSettings, Outer, Workload, may_be_sparse
from evener.commands.doctor_nodes import code_of, look_before_run, question_of
from evener.commands.engines import is_thin, load_backend, probe_of, require_twins
from evener.commands.submission import PreparedRun, new_run_name, pack, submit_run
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
from evener.records.agreement import AGREEMENT_FACTS
from evener.records.errors import InvalidInput, NeedsRanks, NodeLost, UnknownOptimizer
from evener.records.events import Phase, RunEvent
from evener.records.plan import Check, Plan
from evener.records.record import Event, TrainRecord
from evener.records.task import Task, ThinTask
from evener.report.tables import summary
from evener.system.sign_of_life import sign_of_life
from evener.training.console import RunView, open_console, print_line
from evener.training.partial_record import request_of
from evener.training.sync_check import sync_check

E = TypeVar("E", bound=RunEvent)
_LOOK_SECONDS = 0.2


def train_by_agreement(config: RunConfig, *, as_json: bool) -> None:
    """Train on the nodes of a master, with the agreement of `config`.

    Raises:
        EvenerError: the request is impossible, or the run ended early.
    """
    console = open_console(as_json)
    console.quiet = config.quiet
    try:
        with sign_of_life(console.print, "starting: loading the task"):
            backend, task = load_backend(config)
        checked = checked_job(config, backend, task, to_stderr=as_json)
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
        record = submit_agreement(config, backend, task, to_stderr=as_json, checked=checked)
    if as_json:
        print_line(json.dumps(summary(record)))


class CheckedJob(NamedTuple):
    """The job of a run, compared with one process, and ready to be submitted.

    Attributes:
        job: of the run.
        blobs: code and data for the nodes.
        check: comparison with one process; None without one.
        events: about the comparison, for the user.
    """

    job: Job
    blobs: list[Blob]
    check: Check | None
    events: list[RunEvent]


def checked_job(config: RunConfig, backend: ModelBackend, task: Task | ThinTask, *, to_stderr: bool) -> CheckedJob:
    """Make the job of a run, and compare a small step of two nodes with one process.

    Raises:
        InvalidInput: the options do not fit the task.
        UnknownOptimizer: the server has no optimizer like the task's.
        NeedsRanks: nodes that agree through a master would not train like a single process.
    """
    events: list[RunEvent] = []
    console = open_console(to_stderr)
    console.quiet = config.quiet
    job, blobs = prepare(config, backend, task, console.print)
    with sign_of_life(console.print, f"checking {_checked(job)}"):
        check = check_of(config, backend, task, job, events.append)
    if config.agreement == "sync" and job.agreement.push != "none":
        check = None  # which holds without compression
        why = (
            f"--compress {job.agreement.push} makes updates approximate: the nodes do not learn what one process learns"
        )
        events.append(Event(step=0, kind="approximate", message=why))
    return CheckedJob(job, blobs, check, events)


def _checked(job: Job) -> str:
    """Return in words what the check before the run compares."""
    without = "" if job.agreement.push == "none" else ", without compression"
    return f"that the nodes learn what one process learns{without}"


def may_be_ranks(config: RunConfig) -> bool:
    """Return whether ranks can train instead: a PyTorch task, without options of an agreement."""
    has_options = config.compress or config.robust or config.merge or config.system
    return not has_options and not is_thin(config.task)


def _train_as_ranks(config: RunConfig, reason: str, *, to_stderr: bool) -> TrainRecord:
    """Train on the same nodes as ranks; `reason` is why they cannot agree through a master.

    Raises:
        EvenerError: see `train_by_agreement`.
    """
    from evener.commands.train import perform  # imports PyTorch
    from evener.commands.train_as_ranks import submit_ranks

    message = f"{reason}, so the nodes work together as ranks, which give the result of one process"
    request = request_of(config)._replace(events=(Event(step=0, kind="as ranks", message=message),))
    if config.local_nodes is not None:
        return perform(replace(config, agreement=None), to_stderr=to_stderr, request=request)
    home = None if config.master else config.home or default_state_dir(os.environ)
    ranks = replace(config, agreement=None, home=home)
    return submit_ranks(ranks, to_stderr=to_stderr, request=request)


def submit_agreement(
    config: RunConfig,
    backend: ModelBackend,
    task: Task | ThinTask,
    *,
    to_stderr: bool,
    checked: CheckedJob | None = None,
) -> TrainRecord:
    """Train `task` on nodes; return the record, when `backend` has the weights and the folder all other results.

    Raises:
        EvenerError: see `train_by_agreement`.
    """
    job, blobs, check, events = checked or checked_job(config, backend, task, to_stderr=to_stderr)

    def prepare_here(client: MasterClient, view: RunView) -> PreparedRun:
        if config.preflight and config.local_nodes is None:
            view(Phase(what="preflight", detail="looking at the machines of all nodes"))
            for finding in look_before_run(client, *_question(config)):
                view(Event(step=0, kind="preflight", message=finding.words))
        system = await_system(config, client, view)
        run = job
        if config.keeps_data:
            parts = parts_of(config.shares, client.ask().nodes, backend.num_samples, system)
            run = replace(job, workload=replace(job.workload, parts=parts))
        data = ", and data, with which nodes begin as they come" if job.reads_early else " and data"
        view(Phase(what="shipping", detail=f"code, weights{data}" if config.ship_data else "code and weights"))
        return PreparedRun(run, backend.initial_weights(), blobs)

    return submit_run(
        config,
        prepare_here,
        to_stderr=to_stderr,
        request=request_of(config),
        before=events,
        write_weights=backend.write_weights,
        with_check=lambda event: with_check(event, check),
    )


def check_of(
    config: RunConfig, backend: ModelBackend, task: Task | ThinTask, job: Job, show: Callable[[RunEvent], None]
) -> Check | None:
    """Compare a small step of two nodes with one process; None if the agreement promises no equality, or --no-check.

    Raises:
        NeedsRanks: the nodes would not train like a single process.
    """
    is_divided = config.num_local_nodes != 1 and job.agreement.batch > 1
    if config.agreement != "sync" or not config.check or not is_divided:
        return None
    show(Phase(what="checking", detail=_checked(job)))
    check = sync_check(probe_of(backend, task, config.seed), job, backend.initial_weights())
    if config.local_nodes is None and isinstance(task, Task):
        require_twins(config, task)
    if check is None:
        why = "this machine could not compute a small step to compare the nodes with one process"
        show(Event(step=0, kind="not checked", message=why))
    return check


def with_check(event: E, check: Check | None) -> E:
    """Return `event` with `check` in its plan, if it has one."""
    if isinstance(event, Plan):
        return replace(event, check=check)
    return replace(event, plan=replace(event.plan, check=check)) if isinstance(event, TrainRecord) else event


def _question(config: RunConfig) -> tuple[TaskQuestion, bytes] | tuple[()]:
    """Return the task for the nodes to examine before the run, with their data.

    It is empty if each node has its own data or receives them, or if the files are too large to send twice.
    """
    has_own = config.ship_data or config.keeps_data
    if has_own or (is_path(config.task) and code_of(config.task).num_bytes > MAX_CODE_BYTES):
        return ()
    return question_of(config.task, config.data, config.option)


def prepare(
    config: RunConfig,
    backend: ModelBackend,
    task: Task | ThinTask,
    say: Callable[[str], object] = lambda _: None,
) -> tuple[Job, list[Blob]]:
    """Return the job of a run, and the files for the nodes. Raise InvalidInput if options do not fit the task."""
    blobs, reads_early = pack(config, say)
    job = _job(config, backend, *config.sizes_of(task), blobs)
    return replace(job, reads_early=reads_early), list(blobs.values())


def _job(config: RunConfig, backend: ModelBackend, batch_size: int, epochs: int, blobs: dict[str, Blob]) -> Job:
    """Return the job of a run. Raise InvalidInput if options do not fit the task."""
    require_samples(batch_size, backend.num_samples)
    steps = epochs * -(-backend.num_samples // batch_size)
    return Job(
        run=new_run_name(config),
        task=Path(config.task).name if "code" in blobs else config.task,
        title=Path(config.task).stem if "code" in blobs else backend.name,
        data_dir=str(config.data.resolve()) if config.data else "",
        options=config.option,
        precision=config.precision,
        agreement_name=config.agreement or "",
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
    """Wait for all nodes of the system that `config` names, and return it; None if it names none.

    Raises:
        NodeLost: some do not join within the patience.
    """
    if config.system is None:
        return None
    system, until = read_system(config.system), time.monotonic() + config.patience
    announced: list[str] = []
    while missing := system.missing([node.name for node in client.ask().nodes if node.state == "present"]):
        if missing != announced:
            show(Phase(what="waiting", detail=f"for {', '.join(missing)} of {system.file}"))
            announced = missing
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
    """Return the number of stationary samples on each node: by `--shares`, or by scores of the system or nodes.

    Raises:
        InvalidInput: no node is present, or `shares` is for another number of nodes.
    """
    scores = {node.name: (system.score(node.name) if system else None) or node.score for node in nodes}
    here = [node for node in nodes if node.state == "present" and scores[node.name]]
    if not here:
        raise InvalidInput("data stay with the present nodes, and there are none: let them join first")
    weights = relative_shares(shares, len(here)) or [scores[node.name] or 0.0 for node in here]
    sizes = round_table([num_samples], weights)[0].tolist()
    return tuple((node.name, size) for node, size in zip(here, sizes, strict=True) if size)


def agreement_of(
    config: RunConfig, outer: Callable[[], Outer], *, clip_norm: float | None, batch: int
) -> AgreementSettings:
    """Return the settings of the agreement; options that are not given keep its defaults.

    Args:
        config: of the run.
        outer: makes the server's equivalent of the task's optimiser.
        clip_norm: the task's bound on the norm of the gradient.
        batch: samples.

    Raises:
        InvalidInput: the server has no equivalent of the task's optimiser.
    """
    assert config.agreement is not None
    steps, facts = config.local_steps, AGREEMENT_FACTS[config.agreement]
    knobs: dict[str, Any] = {
        "outer": outer() if facts.sends == "gradients" else None,
        "staleness": config.staleness,
        "fraction": config.fraction,
        "local_steps": int(steps) if steps is not None and steps != "epoch" else steps,
        "learning_rate": config.outer_lr,
        "momentum": config.outer_momentum,
    }
    options = {name: value for name, value in knobs.items() if value is not None}
    agreement = AGREEMENT_SETTINGS[config.agreement](batch=batch, **options)
    compression = config.compress or "none"
    if compression == "top-k" and facts.sends == "gradients" and not may_be_sparse(agreement.outer, clip_norm):
        raise InvalidInput(
            f"--agreement {config.agreement} with --compress top-k needs an SGD without clip_norm, whose steps all "
            "nodes compute to the same bits: take --compress int8"
        )
    robust = config.robust or agreement.robust
    return replace(
        agreement,
        push=compression,
        pull=compression,
        slow_link="int8" if config.compress is None and facts.may_compress else "none",
        is_overlapped=config.overlap,
        skips_late=config.skip_late,
        robust=robust,
        merge=config.merge or agreement.merge,
        clip_norm=clip_norm if agreement.contribution == "gradient" else None,
    )
