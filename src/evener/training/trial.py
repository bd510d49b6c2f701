"""A few steps of the same samples from the same weights, by one process and by the ranks of a plan.

An evaluation, then training steps: outputs, losses, gradients, and the state dict after every optimiser step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from evener.comm.step_timing import StepTimer
from evener.comm.traffic import Traffic
from evener.config.run_config import RunConfig
from evener.data.loader import collect, seed_all, split_batch, to_device
from evener.parallel.gradient_hooks import copied
from evener.parallel.optimizer import ModelOptimizer
from evener.parallel.parallel_model import ParallelModel
from evener.records.errors import NotExact
from evener.records.plan import WHOLE_MODEL, Plan, is_pipeline
from evener.records.profile import Precision
from evener.system import accelerators
from evener.system.memory import is_out_of_memory
from evener.tracer.nested import call, map_tensors, tensors_in
from evener.training.context import Arithmetic, RankContext
from evener.training.differences import as_real
from evener.training.draws import SameDraws
from evener.training.joined_model import join_model
from evener.training.loss_parts import off_again, off_in_parts, off_over_data, spread
from evener.training.narrowing import Narrowing
from evener.training.training import seed_update

_STEPS = {"fp64": 2}
"""By precision; else 1: rounding errors of the first step are magnified by the second."""
_CLIPPED = 1e-2
"""Norm to which gradients are clipped if the task clips them: so small that it is felt."""

Values = dict[str, Tensor]


class StepValues(NamedTuple):
    """The values that one training step computes.

    Attributes:
        loss: mean over the samples.
        gradients: by parameter; without those that are not there.
        state: the state dict afterwards.
    """

    loss: float
    gradients: Values
    state: Values


class Results(NamedTuple):
    """The results of a trial on one rank.

    Attributes:
        outputs: of the evaluation of this rank's samples, every tensor in them; None where another rank reports.
        steps: of the training, where they are gathered; else nothing, or what is worth nothing.
    """

    outputs: list[Tensor] | None
    steps: list[StepValues]


class Trial:
    """The trial of a plan; every rank of it makes the same calls.

    Args:
        context: of this rank; its model stays as it is.
        plan: for a few samples.
        config: of the run.
        precision: in which all is computed; float64 on the processor where this rank's device has none.

    Attributes:
        initial: the state dict before the first step.
        narrowing: of what one process computes.
        shared_draws: shapes of draws that are the same for all samples and for this rank's: one number for the batch,
            which every replica would draw separately.
    """

    def __init__(self, context: RankContext, plan: Plan, config: RunConfig, precision: Precision) -> None:
        device = context.env.device
        self._device = accelerators.exact(device) if precision == "fp64" else device
        self._plan, self._precision = plan, precision
        self._arithmetic = Arithmetic(precision, self._device)
        self._arithmetic.scaler = torch.amp.GradScaler(self._device.type, enabled=False)
        self._config = msgspec.structs.replace(config, compile=False, precision=precision)
        self._context = replace(
            context,
            env=replace(context.env, device=self._device),
            group=replace(context.group, device=self._device, timer=StepTimer(self._device), traffic=Traffic()),
            arithmetic=self._arithmetic,
            batch_size=plan.batch_size,
            model=self._copy(context),
        )
        self.initial = _copied(self._context.model.state_dict())
        self.narrowing = Narrowing()
        self.shared_draws: set[tuple[int, ...]] = set()
        self._whole_shapes: set[tuple[int, ...]] = set()
        self._num_steps = _STEPS.get(precision, 1)
        bound = context.task.clip_norm
        self._clip_norm = None if bound is None else min(bound, _CLIPPED)
        sizes = [n * plan.accumulate for n in plan.replica_samples]
        self._sizes, self._starts = sizes, [0, *accumulate(sizes)]
        self._replica = next(i for i, ranks in enumerate(plan.replica_ranks) if context.group.rank in ranks)
        self._norms = _statistics_of(self._context.model) if plan.strategy == "data+pipeline" else set()

    def _copy(self, context: RankContext) -> nn.Module:
        on_device = not is_pipeline(self._plan.strategy)
        model = copied(context.model) if self._device == context.env.device else copied(context.model).to(self._device)
        return self._arithmetic.prepare_model(model, on_device)

    def whole(self) -> Results:
        """Return the results of a single process: outputs of this rank's samples, and all else on the first rank.

        The CPU computes it if the device cannot hold the whole.
        """
        try:
            return self._whole_on(self._device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return self._whole_on(torch.device("cpu"))

    def _whole_on(self, device: torch.device) -> Results:
        model, autocast = copied(self._context.model).to(device), Arithmetic(self._precision, device).autocast
        model.eval()
        inputs, _ = self._batch(*self._interval(self._replica), device)
        before = _plain_attributes(model)
        with torch.no_grad(), self._drawing(0, self._interval(self._replica)), autocast():
            outputs = _tensors(call(model, inputs))
        if self._context.validation_data is not None and len(self._sizes) > 1:
            _refuse_counting(before, _plain_attributes(model))
        if not self._context.group.is_leader:
            return Results(outputs, [])
        replicas = [self._interval(replica) for replica, size in enumerate(self._sizes) if size]
        parts = replicas if self._norms else [(0, self._starts[-1])]
        batches = [((b - a) / self._starts[-1], (a, b), *self._batch(a, b, device)) for a, b in parts]

        def loss(step: int) -> Tensor:
            losses = []
            for weight, interval, inputs, targets in batches:
                with self.narrowing, self._drawing(step, interval) as draws, autocast():
                    losses.append(self._context.task.loss(call(model, _fresh(inputs)), targets) * weight)
                self._whole_shapes |= getattr(draws, "shapes", set())
            return torch.stack(losses).sum()

        return Results(outputs, self._trained_whole(model, loss))

    def off_losses(self) -> tuple[float, float]:
        """Return two relative differences of the loss of all samples, in evaluation mode: when it is called again, and
        when it is computed in parts.

        Call this before `divided`, which takes the model over. The first rank computes it as one process, on the CPU if
        the device cannot hold the whole.
        """
        if self._starts[-1] < 2 or not self._context.group.is_leader:
            return 0.0, 0.0
        try:
            return self._off_losses_on(self._device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return self._off_losses_on(torch.device("cpu"))

    def _off_losses_on(self, device: torch.device) -> tuple[float, float]:
        model, number = copied(self._context.model).to(device).eval(), self._starts[-1]
        _, targets = self._batch(0, number, device)
        made: list[Any] = []
        with torch.no_grad(), Arithmetic(self._precision, device).autocast():
            for count in (number, number - 1):
                inputs, _ = self._batch(0, count, device)
                with self._drawing(0, (0, count)):
                    made.append(call(model, inputs))
            loss, others = self._context.task.loss, self._placed(spread(self._context.num_samples), device)[1]
            off = off_in_parts(loss, made[0], targets, made[1], self._drawing_loss)
            off = max(off, off_over_data(loss, made[0], targets, made[1], others, self._drawing_loss))
            return off_again(loss, made[0], targets, self._drawing_loss), off

    @contextmanager
    def _drawing_loss(self, first: int, last: int) -> Iterator[None]:
        """Make a loss draw the same numbers for the samples from `first` up to `last` as in the whole."""
        seed_all(self._context.seed, 0, 0, device=self._device)
        draws: Any = SameDraws((first, last - first))
        with draws:
            yield

    def _trained_whole(self, model: nn.Module, loss_of: Callable[[int], Tensor]) -> list[StepValues]:
        """Train on all samples at once, or on each pipeline's separately if they are normalised so."""
        model.train()
        seed_update(self._context, 0)
        optimizer = self._context.make_optimizer(model.parameters())
        steps = []
        for step in range(1, self._num_steps + 1):
            loss = loss_of(step)
            torch.autograd.backward(loss)
            gradients = {name: _kept(p.grad) for name, p in model.named_parameters() if p.grad is not None}
            gradients = {name: grad for name, grad in gradients.items() if not grad.isnan().all()}
            if self._clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self._clip_norm)
            seed_update(self._context, step)
            optimizer.step()
            model.zero_grad(set_to_none=True)
            steps.append(StepValues(loss.item(), gradients, self._state(model.state_dict())))
        return steps

    def _state(self, state: dict[str, Tensor]) -> Values:
        """Return a copy of `state` without statistics that pipelines combine differently."""
        return {name: tensor for name, tensor in _copied(state).items() if name not in self._norms}

    def divided(self) -> Results:
        """Return the results of the ranks: outputs on ranks that report, all else on the first one."""
        model, _ = join_model(self._context, self._plan, self._config, is_profiled=False)
        model.train(False)
        inputs, targets = self._batch(*self._interval(self._replica), self._device)
        interval = self._interval(self._replica)
        with self._drawing(0, interval):
            outputs = model.predict(_fresh(inputs))
        model.train()
        seed_update(self._context, 0)
        optimizer = ModelOptimizer(self._context.make_optimizer, model.held())
        steps = []
        for step in range(1, self._num_steps + 1):
            with self._drawing(step, interval) as draws:
                loss = model.add_gradients(
                    _fresh(inputs), targets, samples=self._sizes[self._replica], total=self._starts[-1], is_last=True
                )
            if self._plan.strategy in WHOLE_MODEL and interval[1] - interval[0] != self._starts[-1]:
                self.shared_draws |= self._whole_shapes & draws.shapes
            gradients = self._gradients(model)
            if self._clip_norm is not None:
                model.clip(self._clip_norm)
            seed_update(self._context, step)
            optimizer.step()
            optimizer.clear_gradients()
            steps.append(StepValues(self._summed(loss), gradients, self._state(model.gather_weights())))
        return Results(_tensors(outputs) if model.is_reporter else None, steps)

    def _gradients(self, model: ParallelModel) -> Values:
        """Gather gradients like weights; a weight without a gradient is sent as NaN."""
        held = [(parameter, parameter.data) for parameter in model.parameters()]
        for parameter, data in held:
            none = torch.full_like(data, torch.nan if data.is_floating_point() else 0)
            parameter.data = none if parameter.grad is None else _dense(parameter.grad)
        gathered = _copied(model.gather_weights())
        for parameter, data in held:
            parameter.data = data
        names = [name for name, _ in self._context.model.named_parameters()]
        return {name: gathered[name] for name in names if name in gathered and not gathered[name].isnan().all()}

    def _summed(self, loss: Tensor) -> float:
        rows = self._context.group.all_gather_bytes(np.float64(loss.item()).tobytes())
        return float(sum(np.frombuffer(row)[0] for row in rows))

    def _interval(self, replica: int) -> tuple[int, int]:
        """Return (first, last + 1) of the samples of `replica`; a stand-in if it has none."""
        first, last = self._starts[replica : replica + 2]
        return first, max(first + 1, last)

    def _batch(self, first: int, last: int, device: torch.device) -> tuple[Any, Any]:
        """Return inputs and targets of the samples from `first` up to `last`."""
        return self._placed(np.arange(first, last, dtype=np.int64) % self._context.num_samples, device)

    def _placed(self, indices: NDArray[np.int64], device: torch.device) -> tuple[Any, Any]:
        context = self._context
        batch = split_batch(collect(context.train_data, indices, context.seed, 0))
        inputs, targets = to_device(self._arithmetic.prepare(batch), device)
        return inputs, targets

    @contextmanager
    def _drawing(self, step: int, interval: tuple[int, int]) -> Iterator[Any]:
        """Draw the random numbers of `step` for the samples of `interval`."""
        seed_all(self._context.seed, step, 0, device=self._device)
        with self._draws(interval) as draws:
            yield draws

    def _draws(self, interval: tuple[int, int]) -> AbstractContextManager[Any]:
        """Return a context in which draws of samples do not depend on their part of the batch.

        Stages of a pipeline cut a part into micro-batches themselves, so all samples draw the same numbers there.
        """
        if self._plan.strategy in WHOLE_MODEL:
            part, *parts = [
                (a, b - a) for a, b in (interval, (0, self._starts[-1]), *map(self._interval, range(len(self._sizes))))
            ]
            return SameDraws(part, parts)
        return SameDraws() if is_pipeline(self._plan.strategy) else nullcontext()


def _plain_attributes(model: nn.Module) -> dict[str, Any]:
    """Return the numbers, strings and flags of the modules of `model`, by path and name."""
    return {
        f"{path or 'the model'}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str)
    }


def _refuse_counting(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise NotExact for a model that changes its attributes while it is evaluated: each replica evaluates a part."""
    changed = next((name for name, value in after.items() if before.get(name) != value), None)
    if changed is not None:
        raise NotExact(
            f"{changed} changes whenever the model is evaluated, and every replica evaluates another number of "
            "batches: change it in training alone (if self.training), or take a strategy that does not divide samples"
        )


def _statistics_of(model: nn.Module) -> set[str]:
    """Return the names of BatchNorms' running statistics; each of several pipelines normalises by itself."""
    norms = [(path, module) for path, module in model.named_modules() if isinstance(module, _BatchNorm)]
    return {f"{path}.{name}" if path else name for path, module in norms for name, _ in module.named_buffers()}


def _fresh(inputs: Any) -> Any:
    """Return a copy, which the model may change."""
    return map_tensors(inputs, Tensor.clone)


def _tensors(outputs: Any) -> list[Tensor]:
    return [_kept(tensor) for tensor in tensors_in(outputs)]


def _copied(state: dict[str, Tensor]) -> Values:
    return {name: _kept(tensor) for name, tensor in state.items()}


def _kept(tensor: Tensor) -> Tensor:
    return as_real(_dense(tensor)).cpu().clone()


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
