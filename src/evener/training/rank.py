"""A run of a task on one page: join -> plan -> build -> check -> train -> record.

Every rank of a task runs `train_rank`; those of a program `frontends/programs/script.py: perform_script`, of a
BatchTask `frontends/programs/batch_training.py: train_batches`, of YOLO `frontends/yolo/rank.py`. `train_rank` makes
all decisions from numbers that all ranks share, so the first plan is not sent. Only functions with a `config` read the
options.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from evener.comm.group import Group
from evener.comm.joining import leave_group
from evener.config.run_config import RunConfig
from evener.data.loader import to_device
from evener.launch.rank_environment import RankEnvironment
from evener.launch.unused_rank import stay
from evener.membership.control_channel import ControlChannel
from evener.membership.elastic_group import ElasticGroup
from evener.oracle.data_parallel import without_slow_nodes
from evener.parallel.gradient_hooks import copied
from evener.parallel.pipeline.staged import StagedModel
from evener.parallel.replicated import ReplicatedModel
from evener.records.atomic import atomic_write
from evener.records.decoding import decode_json
from evener.records.errors import DoesNotFit, InvalidInput, NodeLost, NotExact, TaskCannot
from evener.records.plan import WHOLE_MODEL, Plan, Rejected, is_pipeline
from evener.records.record import Event
from evener.records.task import Task
from evener.report.canvas import can_draw, png
from evener.report.figures import timeline_figure
from evener.system.device_failures import failure_behind
from evener.tracer.nested import call
from evener.training.admission import exchange_of, require_beneficial, slowest_link
from evener.training.checkpoint import require_writable, write_weights
from evener.training.context import RankContext, join_run, make_context, require_same_material
from evener.training.elastic.divided import DividedElasticLoop
from evener.training.elastic.replicated import ReplicatedElasticLoop
from evener.training.elastic.start import cost_here, late_context, place_here, publish_state, why_fixed, with_copies
from evener.training.lone_sample import device_of, refuse_lone_sample
from evener.training.loop import Loop
from evener.training.planning import candidate_strategies, make_plan, plan_without_smallest, why_all_take_part
from evener.training.self_check import self_check
from evener.training.session import TrainingSession
from evener.training.task_faults import refuse_outputs, task_fault_of
from evener.training.training import Training, follows_speeds, is_divided_by_costs, make_training


def train_rank(env: RankEnvironment, config: RunConfig, task: Task | None = None) -> None:
    """Run one rank from start to end; the leader emits plan, steps and record through the env.

    Args:
        env: of the rank.
        config: of the run.
        task: to be trained; None: the one that `config` names.
    """
    if env.control is not None and env.control.is_late:
        run_late(*late_context(env, config, task), config, env.control)
        return
    group, config = join_run(env, config)
    with shared_warnings(group):
        context = make_context(env, group, config, task)
    try:
        require_same_material(context)
        require_writable(context.model)
        refuse_outputs(context.task, context.model, context.samples)
        training = prepare(context, config)
    except Exception as error:
        if (meaning := task_fault_of(context, error)) is error:
            raise
        raise meaning from error
    if isinstance(training, Plan):
        stay(env, training)
        return
    why = why_fixed(training, config)
    if training.plan.strategy in WHOLE_MODEL or env.control is None or why:
        context = training.context  # the model that was copied is freed
    if env.control is not None and not why:
        training = with_copies(training, config)
    if training.group.is_leader:
        env.notify(training.plan)
    if env.control is not None and not why:
        uses_all = isinstance(training.model, ReplicatedModel) and training.model.uses_all
        publish_state(env, training.group, training.plan, uses_all=uses_all)
        run_elastic(context, training, config, env.control)
        return
    if config.elastic and training.group.is_leader:
        env.notify(Event(step=0, kind="not elastic", message=f"a lost node ends this run: {why}"))
    loop = Loop(training, config)
    loop.run()
    write_results(training, loop.session, config)
    training.group.barrier()
    leave_group()


def run_elastic(context: RankContext, training: Training, config: RunConfig, control: ControlChannel) -> None:
    """Train from the first step to the record, while ranks may change; the model of `context` is whole."""
    membership = ElasticGroup(control, training.group, context.env.address, context.env.stop_heartbeat)
    if training.plan.strategy in WHOLE_MODEL:
        plan, env = training.plan, context.env
        slowest = slowest_link(env, training.group, plan, follows_speeds=follows_speeds(config, plan))
        ReplicatedElasticLoop(training, config, membership, is_late=False, slowest_link=slowest).run(write_results)
    else:
        among = replace(context, group=training.group)
        DividedElasticLoop(among, training.plan, config, membership, training).run(write_results)


def run_late(context: RankContext, plan: Plan, config: RunConfig, control: ControlChannel) -> None:
    """Train on a rank that joins a run of this plan later. Raise NotNeeded if the run continues without it."""
    membership = ElasticGroup(control, context.group, context.env.address)
    if plan.strategy in WHOLE_MODEL:
        training = make_training(context, plan, config)
        cost = cost_here(context, plan, config)
        slowest = require_beneficial(
            context.env, plan, exchange_of(context.model), cost, follows_speeds=follows_speeds(config, plan)
        )
        loop = ReplicatedElasticLoop(training, config, membership, is_late=True, own_cost=cost, slowest_link=slowest)
        loop.run(write_results)
    else:
        place = place_here(context, plan, config)
        DividedElasticLoop(context, plan, config, membership, None, place).run(write_results)


def prepare(context: RankContext, config: RunConfig) -> Training | Plan:
    """Return all that the loop needs, or only the plan on a rank without work. Every rank of the context calls this.

    If a strategy would not train like a single process, `auto` takes the next one.

    Raises:
        NotExact: the requested strategy, or every one, would not train like a single process.
        DoesNotFit: no nodes hold the model together.
    """
    refused: list[Rejected] = []
    fewer: Plan | None = None
    while True:
        plan = fewer or make_plan(context, config, refused)
        _refuse_lone_sample(context, plan)
        among = context.of_plan(plan)
        misfit = ""
        try:
            training, sentence = (None, "") if among is None else checked(among, plan, config)
        except DoesNotFit as error:  # all ranks of a pipeline raise the same
            if not is_pipeline(plan.strategy):
                raise
            training, sentence, misfit = None, str(error), str(error)
        reasons = refusals(context, sentence)
        if not reasons:
            fewer = plan_of_fewer(context, training, config)
            if fewer is None:
                return plan if training is None else explained(training, config)
            continue
        if is_pipeline(plan.strategy) and any(context.group.all_gather_bytes(misfit.encode())):
            fewer = plan_without_smallest(context, config, plan, reasons[0])
            if fewer is None:
                raise DoesNotFit(reasons[0])
            continue
        fewer = None
        refused.append(Rejected(what=plan.strategy, reason=reasons[0]))
        if context.user_plan or len(refused) == len(candidate_strategies(config, len(context.env.nodes))):
            raise NotExact(reasons[0])


def explained(training: Training, config: RunConfig) -> Training:
    """Return `training` whose plan says why all nodes take part, if some make steps longer."""
    reasons = {
        "--plan says so": training.context.user_plan is not None,
        f"--shares {config.shares} gives each its part": config.shares != "measured",
        "--stationary leaves data on each": config.stationary,
    }
    return replace(training, plan=why_all_take_part(training.plan, reasons))


def plan_of_fewer(context: RankContext, training: Training | None, config: RunConfig) -> Plan | None:
    """Return the plan without nodes that make its steps longer, by its prediction; None if all nodes help.

    Every rank of the context calls this; `training` is None on ranks that have no work already.
    """
    fewer = None
    if training is not None and context.user_plan is None and is_divided_by_costs(training.plan, config):
        fewer = without_slow_nodes(training.plan)
    rows = context.group.all_gather_bytes(b"" if fewer is None else msgspec.json.encode(fewer))
    return next((decode_json(row, Plan) for row in rows if row), None)


def _refuse_lone_sample(context: RankContext, plan: Plan) -> None:
    """Raise InvalidInput if a step of `plan` has one sample that the model's BatchNorm cannot take."""
    refuse_lone_sample(
        context.model,
        lambda model: call(model, to_device(context.samples(1)[0], device_of(model))),
        samples=context.num_samples,
        batch_size=context.batch_size,
        parts=plan.accumulate,
    )


def refusals(context: RankContext, reason: str) -> list[str]:
    """Return why ranks cannot train like a single process; `reason` is that of this rank.

    Raises:
        NotExact: this rank alone cannot train its part; the others are in the middle of the step, waiting for it.
    """
    mesh = context.group.reports
    if mesh is None:
        return [reason] if reason else []
    if not reason:
        return [row.decode() for row in mesh.all_gather(b"") if row]
    try:
        with mesh.within(context.env.patience):
            return [row.decode() for row in mesh.all_gather(reason.encode()) if row]
    except NodeLost as error:
        raise NotExact(reason) from error


def checked(context: RankContext, plan: Plan, config: RunConfig) -> tuple[Training | None, str]:
    """Return all that the loop needs for `plan`, or why it would not train like a single process."""
    model = copied(context.model)  # parts of the other one are taken over
    try:
        training = make_training(replace(context, model=model), plan, config)
    except TaskCannot:
        raise
    except InvalidInput as error:
        if config.strategy != "auto" or context.user_plan is not None or _has_failed_device(context, error):
            raise
        return None, str(error)
    if not config.check or context.group.size == 1:
        return training, ""
    context.begins("checking", "that the nodes learn what one process learns")
    try:
        check = self_check(context, training.plan, config)
    except NotExact as error:
        if _has_failed_device(context, error):
            raise
        return None, str(error)
    return replace(training, plan=msgspec.structs.replace(training.plan, check=check)), ""


def _has_failed_device(context: RankContext, error: Exception) -> bool:
    """Return whether `error` says nothing about the strategy, as this rank's device is full or lost."""
    return failure_behind(error, str(context.env.device)) is not None


def write_results(training: Training, session: TrainingSession, config: RunConfig) -> None:
    """Write weights and timeline into the run's folder, and emit the record; every rank calls this.

    Args:
        training: that has ended.
        session: of this rank.
        config: of the run.

    Raises:
        CannotWrite: the disk is full or gone; the record is emitted all the same.
    """
    context = training.context
    record = session.record(
        config.started,
        task=context.task.name,
        seed=context.seed,
        epochs=context.epochs,
        precision=context.arithmetic.precision,
    )
    if isinstance(training.model, StagedModel):
        write_timeline(training.model, config.folder)
    weights = training.model.gather_weights()
    if training.group.is_leader:
        try:
            write_weights(weights, config.folder)
        finally:
            context.env.notify(record)


def write_timeline(model: StagedModel, folder: Path) -> None:
    """Write the last step as `timeline.json` (for ui.perfetto.dev) and, with Matplotlib, `timeline.png`."""
    timeline = model.pipeline.timeline()
    if not model.group.is_leader:
        return
    atomic_write(folder / "timeline.json", timeline.chrome_trace())
    if can_draw():  # the trace shows the same
        atomic_write(folder / "timeline.png", png(timeline_figure(timeline)))


@contextmanager
def shared_warnings(group: Group) -> Iterator[None]:
    """Show each warning of the block once for all ranks of `group`, after the block; every rank calls this.

    If the block fails on this rank, it shows its own warnings.
    """
    if group.size == 1:
        yield
        return
    shown_before: set[str] = set()
    recorded: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as recorded:
            yield
        rows = group.all_gather_bytes(msgspec.json.encode([_text(warning) for warning in recorded]))
        shown_before = {text for row in rows[: group.rank] for text in decode_json(row, list[str])}
    finally:
        for warning in recorded:
            if _text(warning) not in shown_before:
                warnings.showwarning(
                    warning.message, warning.category, warning.filename, warning.lineno, warning.file, warning.line
                )


def _text(warning: warnings.WarningMessage) -> str:
    return f"{warning.category.__name__}: {warning.message}"
