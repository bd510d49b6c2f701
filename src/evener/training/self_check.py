"""Comparison of the ranks' training with a single process, on a few samples, before the first step.

    both     an evaluation, then training steps, of the same samples from the same weights
    equal?   outputs, loss, gradients, buffers, weights after the optimiser

The ranks perform the plan: each its uneven share, none if the plan gives none. One of them also computes the whole by
itself. Random numbers are equal: from the same seed if the division promises the draws of one process, else the same
for every sample.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch
from torch import Tensor, nn

from evener.config.run_config import RunConfig
from evener.launch.rank_environment import is_broken_connection
from evener.parallel.norms import has_batch_norm
from evener.records.decoding import decode_msgpack
from evener.records.errors import EvenerError, NotExact, TrainingFailed, first_line, is_noted, place_of, words_of
from evener.records.plan import Check, Plan, is_pipeline
from evener.records.profile import Precision
from evener.system.device_failures import failure_behind
from evener.system.memory import is_out_of_memory
from evener.training.context import RankContext
from evener.training.differences import Difference, largest, off_by, statistic_size
from evener.training.joined_model import is_cut_alike
from evener.training.trial import Results, StepValues, Trial, Values
from evener.training.trial_memory import TrialMemory

_LOSS_AGAIN = "the loss of a batch, called again"
_LOSS_IN_PARTS = "the loss of a batch in parts"
_DRAWN_FOR_ALL = "a random number for the whole batch"
_EXACT: Precision = "fp64"
_MAX_SAMPLES = 4
"""Samples of the largest replica."""
_TOLERANCES = {"fp64": 1e-8, "fp32": 0.05, "bf16": 0.5, "fp16": 0.5}
"""By precision, relative: sums in another order differ in the last digits, and normalisation magnifies that.

In double precision, what a model casts down is held to the rounding of the narrower type.
"""
_ROUNDING = 1e3 * 2.0**-52
"""Of the largest value: what is smaller in float64 may be a rounding error."""
_MIN_CHANGE = 1e-4
"""Relative change of a loss that is computed again from the same numbers: a smaller one is rounding."""
_MIN_GRADIENT = 1e-3
"""Of the largest gradient: a smaller one is judged as if it had this size, as it may be a sum that cancels out."""
_SECONDS, _PART = 5.0, 0.03
"""Seconds of the check, or part of the run, whichever is more."""
_SMALL_MODEL = 10_000_000
"""Weights of a model that is compared in double precision, too, however slow the machine is."""
_DOUBLE = 2.0
"""Double precision takes this many times as long as single precision."""
_WAIT, _BUDGETS, _WHOLES = 60.0, 10.0, 20.0
"""The timeout of the ranks: the maximum of these seconds, times the budget, and times the single process."""


def self_check(context: RankContext, plan: Plan, config: RunConfig) -> Check:
    """Compare and return the largest difference; every rank of `plan`, and no other, calls this.

    Args:
        context: of this rank; its model stays as it is.
        plan: to be performed, with its stages if it is of a pipeline.
        config: of the run.

    Raises:
        NotExact: the ranks would not train like a single process; says which value differs, and by how much. If this
            rank's device failed, that is its cause.
    """
    begin = time.perf_counter()
    small = small_plan(plan, context.model)
    budget = max(_SECONDS, _PART * _run_seconds(context, plan))
    precisions: list[Precision] = []
    size = sum(weight.numel() for weight in context.model.parameters())
    memory = TrialMemory(context.env, config.precision)
    for precision in dict.fromkeys((config.precision, _EXACT)):
        is_short = bool(precisions) and not memory.suffices_for_double()
        spent, shortest = context.group.all_reduce_max([time.perf_counter() - begin, float(is_short)])
        is_slow = size > _SMALL_MODEL and (1 + _DOUBLE) * spent > budget
        if precisions and (is_slow or shortest):
            break
        difference = _compare(context, small, config, precision, budget, divides_samples(plan))
        if difference is not None:
            precisions.append(precision)
            worst = difference
    return Check(
        samples=small.replica_samples,
        precisions=tuple(precisions),
        where=worst.what,
        off=worst.off,
        seconds=time.perf_counter() - begin,
    )


def small_plan(plan: Plan, model: nn.Module) -> Plan:
    """Return `plan` for the fewest samples that show its uneven division."""
    samples = plan.replica_samples
    scale = min(1.0, _MAX_SAMPLES / max(samples))
    sizes = [0 if n == 0 else max(min(n, 2), round(n * scale)) for n in samples]
    if len(set(sizes)) == 1 < len(sizes):
        sizes[0] += 1
    number = 2 if is_pipeline(plan.strategy) and plan.accumulate > 1 and not has_batch_norm(model) else 1
    assignments = list(plan.assignments)
    for ranks, size in zip(plan.replica_ranks, sizes, strict=True):
        for rank in ranks:
            begin = assignments[rank].first_layer if is_cut_alike(plan) else ""
            assignments[rank] = msgspec.structs.replace(
                assignments[rank], samples=size, max_samples=None, first_layer=begin
            )
    return msgspec.structs.replace(
        plan, batch_size=sum(sizes) * number, accumulate=number, assignments=tuple(assignments)
    )


def divides_samples(plan: Plan) -> bool:
    """Return whether the loss of a step is computed part by part, on replicas or in micro-batches of pipelines."""
    return len(plan.replica_ranks) > 1 or (is_pipeline(plan.strategy) and plan.accumulate > 1)


def _run_seconds(context: RankContext, plan: Plan) -> float:
    steps = context.epochs * -(-context.num_samples // context.batch_size)
    return steps * plan.prediction.step_seconds if plan.prediction else 0.0


def _compare(
    context: RankContext, plan: Plan, config: RunConfig, precision: Precision, budget: float, in_parts: bool
) -> Difference | None:
    """Return the largest difference in `precision`; None if the model does not compute in an fp64 not requested.

    Raises:
        NotExact: it is too large.
    """
    group, is_asked = context.group, precision == config.precision
    trial = Trial(context, plan, config, precision)
    begin = time.perf_counter()
    error: Exception | None = None
    try:
        expected = trial.whole()
    except Exception as raised:
        failure = failure_behind(raised, str(context.env.device))
        if failure is not None and (is_asked or not is_out_of_memory(failure)):
            raise  # the others learn it from the error that ends this rank
        error = raised
    failures = [row.decode() for row in group.all_gather_bytes(first_line(error).encode() if error else b"") if row]
    if failures and is_asked:
        raise error or TrainingFailed(failures[0])
    if failures:
        return None
    tolerance_here = trial.narrowing.tolerance if precision == _EXACT else 0.0
    spent, narrow = group.all_reduce_max([time.perf_counter() - begin, tolerance_here])
    tolerance = max(_TOLERANCES[precision], narrow)
    with _within(context, plan, max(_WAIT, _BUDGETS * budget, _WHOLES * spent)):
        losses = zip((_LOSS_AGAIN, _LOSS_IN_PARTS), trial.off_losses(), strict=True) if in_parts else ()
        differences = [Difference(what, off) for what, off in losses]
        differences += _differences(_divided(trial, plan), expected, trial.initial, precision)
        if trial.shared_draws:
            differences.insert(0, Difference(_DRAWN_FOR_ALL, float("inf")))
        rows = group.all_gather_bytes(msgspec.msgpack.encode(differences))  # JSON has no infinity
    ordered = [one for row in rows for one in decode_msgpack(row, list[Difference])]
    failed = next((one for one in ordered if not one.off <= tolerance), None)
    if failed is not None:  # a loss that changes from call to call explains all other differences
        changing = (one for one in ordered if one.what == _LOSS_AGAIN and one.off > _MIN_CHANGE)
        raise NotExact(_sentence(plan, precision, next(changing, failed)))
    return max(ordered, key=lambda one: one.off)


@contextmanager
def _within(context: RankContext, plan: Plan, seconds: float) -> Iterator[None]:
    """End this process if the block takes longer than `seconds`: the ranks may wait for each other forever."""
    error = NotExact(
        f"--strategy {plan.strategy} cannot train this model: in the check before the first step node "
        f"{context.env.node.name} waited {seconds:.0f} s for the others; take another strategy, or --no-check"
    )
    timer = threading.Timer(seconds, context.env.end, [error])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _divided(trial: Trial, plan: Plan) -> Results:
    try:
        return trial.divided()
    except Exception as error:
        if isinstance(error, EvenerError) and not is_noted(error):
            raise
        if isinstance(error, RuntimeError) and is_broken_connection(error):
            raise  # another rank has ended, which says why
        raise NotExact(
            f"--strategy {plan.strategy} cannot train this model{place_of(error)}: {words_of(error)}"
        ) from error


def _differences(divided: Results, whole: Results, initial: Values, precision: Precision) -> Iterator[Difference]:
    """Yield the differences of all values in the order of computing: the first large one shows the cause."""
    if divided.outputs is not None:
        assert whole.outputs is not None
        yield Difference("the number of tensors in the outputs", abs(len(divided.outputs) - len(whole.outputs)))
        for value, expected in zip(divided.outputs, whole.outputs, strict=False):
            yield Difference("the output in evaluation mode", off_by(value, expected, largest(expected)))
    noise: Values = {}
    for number, (step, right) in enumerate(zip(divided.steps, whole.steps, strict=False), 1):
        yield Difference(f"the loss of step {number}", abs(step.loss - right.loss) / max(abs(right.loss), 1e-6))
        if precision != _EXACT:
            yield _whole_gradient_difference(step, right)
            continue
        yield from _gradient_differences(step, right, number)
        noise = {name: noise.get(name, False) | one for name, one in _uncertain(step, right).items()}
        yield from _state_differences(step, right, initial, number, noise)


def _whole_gradient_difference(step: StepValues, expected: StepValues) -> Difference:
    """Return the difference of all gradients together: single ones may be only rounding errors."""
    both = list(_gradients(step, expected))
    missing = [name for name, value, right in both if value.shape != right.shape]
    if missing:
        return Difference(f"the gradient of {missing[0]} in step 1", float("inf"))
    pairs = [(value.double(), right.double()) for _, value, right in both]
    off, size = sum(float((a - b).square().sum()) for a, b in pairs), sum(float(b.square().sum()) for _, b in pairs)
    return Difference("the gradient of step 1", (off / max(size, 1e-30)) ** 0.5)


def _gradient_differences(step: StepValues, expected: StepValues, number: int) -> Iterator[Difference]:
    most = max(map(largest, expected.gradients.values()), default=0.0)
    for name, value, right in _gradients(step, expected):
        off = off_by(value, right, max(largest(right), _MIN_GRADIENT * most))
        yield Difference(f"the gradient of {name} in step {number}", off)


def _gradients(step: StepValues, expected: StepValues) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, actual, expected) gradients; missing ones are zeros: if that matters, weights will differ."""
    for name, one in reversed({**step.gradients, **expected.gradients}.items()):
        none = torch.zeros_like(one)
        yield name, step.gradients.get(name, none), expected.gradients.get(name, none)


def _uncertain(step: StepValues, expected: StepValues) -> Values:
    """Return, by parameter, where its gradient is only rounding, which some optimisers magnify."""
    uncertain: Values = {}
    for name, right in expected.gradients.items():
        value = step.gradients.get(name)
        if value is not None and value.shape == right.shape:
            uncertain[name] = right.abs() <= 10 * largest(value - right) / _TOLERANCES[_EXACT]
    return uncertain


def _state_differences(
    step: StepValues, expected: StepValues, initial: Values, number: int, noise: Values
) -> Iterator[Difference]:
    """Yield the differences of the state dict, relative to its change since the first step."""
    for name, right in expected.state.items():
        value = _at(step.state, name)
        rounding = _ROUNDING * max(largest(right), largest(initial[name]))
        if name in noise and value.shape == right.shape:
            value = torch.where(noise[name], right, value)
        size = max(largest(right - initial[name]) + rounding, statistic_size(name, expected.state))
        yield Difference(f"{name} after step {number}", off_by(value, right, size))


def _at(values: Values, name: str) -> Tensor:
    """Return the value called `name`, or a tensor that equals no other."""
    return values.get(name, torch.empty(0, 0))


def _sentence(plan: Plan, precision: Precision, difference: Difference) -> str:
    samples = "+".join(map(str, plan.replica_samples))
    if difference.what == _DRAWN_FOR_ALL:
        return (
            f"--strategy {plan.strategy} divides the samples, but the model or its loss draws a random number for the "
            "whole batch, such as a coin for a layer, and each node would draw another one: draw one for every sample, "
            "write a BatchTask, in which all nodes draw the same, or --no-check"
        )
    if difference.what == _LOSS_AGAIN:
        return (
            f"--strategy {plan.strategy} divides the samples, but the loss changes from call to call: for the same "
            f"outputs and targets the next value differs by a factor of {difference.off:.2g}, as if it counted its "
            "calls. Compute it from outputs and targets alone, write a BatchTask, or --no-check"
        )
    if difference.what == _LOSS_IN_PARTS:
        return (
            f"--strategy {plan.strategy} divides the samples, but the loss of a batch is no mean over samples: that of "
            f"its parts differs by a factor of {difference.off:.2g}. Take the mean of each sample first, write a "
            "BatchTask whose count= returns what the mean is over, use --strategy filter, or --no-check"
        )
    return (
        f"--strategy {plan.strategy} would not train like a single process: {difference.what} differs by a factor of "
        f"{difference.off:.2g} ({precision}, {samples} samples); take another strategy, or --no-check"
    )
