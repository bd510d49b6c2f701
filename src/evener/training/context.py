"""The context of a rank: its place in a run, model, data and settings, created once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset

from evener.comm.group import Group
from evener.comm.joining import join_group
from evener.comm.mesh_joining import join_mesh
from evener.comm.peer_lines import PeerLines
from evener.comm.staged_gloo import BACKEND
from evener.comm.step_timing import StepTimer
from evener.config.conflicts import strategy_conflict
from evener.config.run_config import RunConfig, decode_config, encode_config, require_samples
from evener.data.alike import require_same_data
from evener.data.loader import collect, count_samples, seed_all, split_batch
from evener.data.tasks.load import load_task
from evener.launch.preflight import require_fit
from evener.launch.rank_environment import RankEnvironment
from evener.launch.store import LEAST_START_SECONDS
from evener.parallel.op_registry import without_synchronised
from evener.parallel.refusals import refuse_lazy
from evener.records.errors import InvalidInput, noting, require
from evener.records.events import Phase
from evener.records.plan import Plan
from evener.records.profile import Precision
from evener.records.record import Event
from evener.records.schema import read_noun
from evener.records.task import Task
from evener.system import accelerators
from evener.system.sign_of_life import sign_of_life
from evener.tracer.nested import map_tensors

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_AGREEMENT_OF_STRATEGY = {"averaging": "average", "server": "sync", "asynchronous server": "async"}
"""The `--agreement` of a master's run, by strategy."""


class Arithmetic:
    """The arithmetic of one rank at one precision.

    Args:
        precision: fp32 and fp64 compute as they say; bf16 and fp16 by autocast over float32 weights.
        device: that computes.

    Raises:
        InvalidInput: the device does not compute in this precision.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        if precision == "fp64" and not accelerators.has_float64(device):
            raise InvalidInput(f"--precision fp64: {device} has no double precision; use fp32, or the processor (cpu)")
        self.precision, self._device = precision, device
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which operations choose their type as the precision says."""
        if self.precision in _AUTOCAST:
            return torch.autocast(self._device.type, dtype=_AUTOCAST[self.precision])
        return nullcontext()

    def prepare_model(self, model: nn.Module, on_device: bool = True) -> nn.Module:
        """Return the model with weights of the precision's type, moved to the device if `on_device`."""
        model = model._apply(_widened) if self.precision == "fp64" else model  # type: ignore[no-untyped-call]
        with noting("model, where it is moved to its device"):
            return model.to(self._device) if on_device else model

    def prepare(self, value: Any) -> Any:
        """Return `value` with floating-point tensors in double precision if the run is fp64."""
        if self.precision != "fp64":
            return value
        return map_tensors(value, _widened)


def _widened(tensor: Tensor) -> Tensor:
    """Return `tensor` in double precision if its elements are real or complex numbers."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """The context of a rank: its place in a run, model, data and settings.

    Attributes:
        env: of this rank: its node, its device, and how it reaches the user.
        group: the ranks that work together: all of them, until a plan leaves some out.
        task: to be trained.
        user_plan: the plan that the user gave; None if the ranks make one.
        batch_size: samples of a step, over all ranks.
        epochs: passes over the training data.
        seed: of weights, order of samples and random transforms.
        arithmetic: of the run's precision.
        model: the whole of it; weights follow the seed.
        train_data: map-style.
        validation_data: map-style, or None.
        make_optimizer: of some parameters.
        uses_all: whether every parameter has a dense gradient in every step, if that is known already.
        measured: what micro-batches cost all nodes, by their size and their number in a step.
    """

    env: RankEnvironment
    group: Group
    task: Task
    user_plan: Plan | None
    batch_size: int
    epochs: int
    seed: int
    arithmetic: Arithmetic
    model: nn.Module
    train_data: Dataset[Any]
    validation_data: Dataset[Any] | None
    make_optimizer: Callable[[Any], Optimizer]
    uses_all: bool | None = None
    measured: dict[tuple[int, int], Any] = field(default_factory=dict)

    def begins(self, what: str, detail: str = "") -> None:
        """Have the leader announce the next phase of the run."""
        if self.group.is_leader:
            self.env.notify(Phase(what=what, detail=detail))

    def of_plan(self, plan: Plan) -> RankContext | None:
        """Return the context among the ranks of `plan`; None on other ranks. All ranks of the group call this."""
        nodes = self.group.nodes
        group = self.group.subgroup([nodes.index(a.node) for a in plan.assignments])
        if group is None:
            return None
        group.divide_sums(plan.line_rates)
        return replace(self, group=group)

    @property
    def num_samples(self) -> int:
        """The number of training samples."""
        return count_samples(self.train_data)

    def samples(self, count: int) -> tuple[Any, Any]:
        """Return inputs and targets of `count` training samples, in the run's precision, on the CPU."""
        indices = torch.arange(count).remainder(self.num_samples).numpy()
        inputs, targets = split_batch(collect(self.train_data, indices, self.seed, 0))
        return self.arithmetic.prepare(inputs), self.arithmetic.prepare(targets)


def join_run(env: RankEnvironment, config: RunConfig) -> tuple[Group, RunConfig]:
    """Join the other ranks; return the first rank's config, unless each rank has its own paths.

    Raises:
        NodeLost: a rank does not come, or machines do not reach each other.
        InvalidInput: machines do not fit together.
    """
    is_elastic = config.elastic if config.is_elastic else False
    group = join_world(env, abandonable_backend(env, is_elastic), preflight=config.preflight)
    if env.has_own_paths:
        return group, config
    first = group.all_gather_bytes(encode_config(config))[0]
    return group, decode_config(first)


def make_context(env: RankEnvironment, group: Group, config: RunConfig, task: Task | None = None) -> RankContext:
    """Return the context of a rank of `group`; load the task if it is None.

    Raises:
        InvalidInput: the task or its options are wrong.
    """
    task, user_plan = task or load_task(config.task, config.data, config.option), read_plan(config)
    arithmetic = Arithmetic(config.precision, env.device)
    batch_size, epochs = config.sizes_of(task, user_plan)
    train_data = task.train_data()
    require_samples(batch_size, count_samples(train_data))
    validation_data = task.validation_data() if task.validation_data else None
    require(validation_data is None or count_samples(validation_data) > 0, "validation samples", 0, "at least one")
    is_divided_later = (user_plan.strategy if user_plan else config.strategy).startswith("pipeline")
    seed_all(config.seed)
    return RankContext(
        env=env,
        group=group,
        task=task,
        user_plan=user_plan,
        batch_size=batch_size,
        epochs=epochs,
        seed=config.seed,
        arithmetic=arithmetic,
        model=arithmetic.prepare_model(without_synchronised(refuse_lazy(task.model())), on_device=not is_divided_later),
        train_data=train_data,
        validation_data=validation_data,
        make_optimizer=task.optimizer or (lambda parameters: SGD(parameters, lr=0.1, momentum=0.9)),
    )


def require_same_material(context: RankContext) -> None:
    """Raise InvalidInput unless all nodes have the same data; every rank calls this."""
    if context.group.size > 1:
        require_same_data(context.group, context.train_data, context.seed, "training data")
        if context.validation_data is not None:
            require_same_data(context.group, context.validation_data, context.seed, "validation data")


def abandonable_backend(env: RankEnvironment, is_elastic: bool | None) -> str | None:
    """Return the backend for tensors of ranks that go on without lost ones; None if the usual one does, or none may go.

    Args:
        env: of a rank.
        is_elastic: whether the run goes on without lost ranks; None for the default: ranks of one machine exchange
            directly where their devices can.
    """
    is_wished = len({node.host for node in env.nodes}) > 1 if is_elastic is None else is_elastic
    return BACKEND if is_wished and env.control is not None and env.backend != "gloo" else None


def join_world(env: RankEnvironment, backend: str | None = None, *, preflight: bool = True) -> Group:
    """Return the group of all ranks, after the preflight check between several machines.

    Args:
        env: of this rank.
        backend: for tensors, see `join_group`; the default suits the devices.
        preflight: whether to run the check; the first rank's value counts.

    Raises:
        NodeLost: a rank does not come, or machines do not reach each other.
        InvalidInput: machines do not fit together.
    """
    with record_function("join"):
        pass  # else PyTorch imports a module in the first step; it prints a traceback if a loader's worker dies then
    is_first_here = all(node.host != env.node.host for node in env.nodes[: env.rank])
    with ExitStack() as waiting:
        if env.tell is not None and is_first_here and len(env.nodes) > 1:
            waiting.enter_context(sign_of_life(env.tell, "joining: the other ranks"))
        for finding in require_fit(env, is_wanted=preflight):
            if env.rank == 0:
                env.notify(Event(step=0, kind="preflight", message=finding.words))
        group = join_group(
            rank=env.rank,
            nodes=env.names,
            device=env.device,
            store=env.store,
            patience=env.patience,
            address=env.address,
            backend=backend or env.backend,
            timer=StepTimer(env.device, env.node.speed_at(0)),
        )
        _watch_lines(env)
        return group


def _watch_lines(env: RankEnvironment) -> None:
    """Have the heartbeat watch this rank's connections to the others, if they are on several machines."""
    if env.heartbeat is None or env.store is None or len({node.host for node in env.nodes}) == 1:
        return
    mesh = join_mesh(
        rank=env.rank,
        nodes=env.names,
        store=env.store.under("lines"),
        address=env.address,
        patience=max(env.patience, LEAST_START_SECONDS),
        longest_wait=env.patience,
    )
    env.heartbeat.watch_lines(PeerLines(mesh, env.patience))


def read_plan(config: RunConfig) -> Plan | None:
    """Return the user's plan; None without `--plan`.

    Raises:
        MissingFile, InvalidFile: it cannot be read.
        InvalidInput: other options contradict the plan, or only a master can perform it.
    """
    if config.plan is None:
        return None
    plan = read_noun(config.plan, Plan)
    if plan.strategy in _AGREEMENT_OF_STRATEGY:
        raise InvalidInput(
            f"the plan's strategy is {plan.strategy}, which a master performs: start `evener up`, let the nodes join, "
            f"and train with --agreement {_AGREEMENT_OF_STRATEGY[plan.strategy]}"
        )
    if config.batch_size not in (None, plan.batch_size):
        raise InvalidInput("--batch-size does not go with --plan, which says it already")
    if sentence := strategy_conflict(config, plan.strategy):
        raise InvalidInput(sentence)
    return plan
