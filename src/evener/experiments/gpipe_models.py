"""The two families of models of the GPipe paper, and the largest of each that fits a memory budget.

for every number of stages (and one without re-materialisation, "naive")
    guess the number of layers from the bytes of a layer
    search from there for the last one for which the library finds a division that fits
    train a step of that model, a process per stage, and count its memory; or report what the division predicts
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.benchmark.dry_run import LiveBytes
from evener.comm.group import Group
from evener.experiments.local_ranks import equal_nodes, measure_on
from evener.experiments.models.amoebanet import AmoebaNetD
from evener.experiments.models.transformer import Transformer, tokens_in, translation_loss
from evener.oracle.schedule import Rematerialise
from evener.oracle.stages import DeviceGroup
from evener.parallel.pipeline.micro_batches import Loss, LossWeight, micro_batch_sizes, resized
from evener.parallel.pipeline.partition_plan import PartitionPlan, PipelineConfig, plan_partition
from evener.parallel.pipeline.partition_problem import WEIGHT_COPIES, PartitionProblem, partition_problem
from evener.parallel.pipeline.pipeline import Pipeline
from evener.parallel.pipeline.placement import StagePlacement
from evener.records.decoding import decode_json
from evener.records.errors import DoesNotFit
from evener.records.schema import Part
from evener.tracer.meta_model import on_meta

AMOEBANET, TRANSFORMER = "AmoebaNet-D", "Transformer"
NAIVE = 0
"""Stands for one accelerator without re-materialisation, in place of a number of stages."""


class PipelineSpeed(Part, frozen=True, kw_only=True):
    """Speed of K stages with M micro-batches in the median step, and the idle share of their time in the last."""

    family: str
    stages: int
    micro_batches: int
    samples_per_second: float
    bubble: float


class Scale(Part, frozen=True, kw_only=True):
    """Sizes of one family.

    Attributes:
        width: filters of AmoebaNet-D, or D of a Transformer, in the search for the largest model.
        length: rows and columns of an image, or tokens of a sentence.
        classes: classes of an image, or of a token.
        samples: samples of a batch in that search, in `micro_batches` parts.
        memory: bytes of a device in that search.
        timed_layers: layers of the timed model; `timed_width` and `timed_samples` are its other sizes.
    """

    family: str
    width: int
    length: int
    classes: int
    samples: int
    micro_batches: int
    memory: float
    timed_layers: int
    timed_width: int
    timed_samples: int

    @property
    def unit(self) -> int:
        """The number of layers by which a model grows."""
        return 3 if self.family == AMOEBANET else 1

    def build_without_memory(self, layers: int) -> nn.Module:
        """Return a model with `layers` layers for the search, on the meta device."""
        with torch.device("meta"):
            return self._build(layers, self.width)

    def build_timed(self) -> nn.Module:
        """Return the model that is timed."""
        return self._build(self.timed_layers, self.timed_width)

    def _build(self, layers: int, width: int) -> nn.Module:
        if self.family == AMOEBANET:
            return AmoebaNetD(layers, width, self.classes)
        heads = max(1, width // 64) * 2
        return Transformer(self.classes, layers, width, heads, 4 * width, dropout=0.0, tied=False)

    def batch(self, samples: int) -> tuple[Any, Tensor]:
        """Return inputs and targets: noise, the same on every rank."""
        draw = torch.Generator().manual_seed(0)
        if self.family == AMOEBANET:
            images = torch.randn(samples, 3, self.length, self.length, generator=draw)
            return images, torch.randint(0, self.classes, (samples,), generator=draw)
        source, target, successors = torch.randint(1, self.classes, (3, samples, self.length), generator=draw)
        return (source, target), successors

    @property
    def loss(self) -> Loss:
        """The loss of the model's outputs and targets."""
        return F.cross_entropy if self.family == AMOEBANET else translation_loss

    @property
    def weigh(self) -> LossWeight:
        """The weight of a batch in the mean of losses."""
        count: Callable[[Tensor], float] = len if self.family == AMOEBANET else lambda t: float(tokens_in(t))
        return count


SMALL = (
    Scale(
        family=AMOEBANET, width=32, length=32, classes=10, samples=8, micro_batches=4, memory=14e6,
        timed_layers=3, timed_width=96, timed_samples=64,
    ),
    Scale(
        family=TRANSFORMER, width=64, length=24, classes=64, samples=16, micro_batches=8, memory=16e6,
        timed_layers=4, timed_width=256, timed_samples=64,
    ),
)  # fmt: skip
"""Sizes for a few CPU cores."""
FULL = (
    Scale(
        family=AMOEBANET, width=256, length=224, classes=1000, samples=128, micro_batches=32, memory=8e9,
        timed_layers=18, timed_width=256, timed_samples=128,
    ),
    Scale(
        family=TRANSFORMER, width=2048, length=1024, classes=32000, samples=32, micro_batches=32, memory=16e9,
        timed_layers=24, timed_width=2048, timed_samples=32,
    ),
)  # fmt: skip
"""Sizes of the paper: AmoebaNet-D(18, 256), and Transformer-48 as 24 layers of encoder and of decoder."""


class Largest(Part, frozen=True, kw_only=True):
    """The largest model of a family.

    Attributes:
        stages: number of devices; NAIVE for one without re-materialisation.
        layers: number of layers; 0 if no model fits.
        activation_bytes: bytes that the fullest device held at the peak of a step, including transient tensors.
        fullest: bytes of weights, gradients, optimizer state and activations on that device.
        memory: bytes that a device may hold.
    """

    family: str
    stages: int
    layers: int
    parameters: int
    activation_bytes: int
    fullest: int
    memory: float


def largest(scale: Scale, stages: int, *, is_planned: bool = False) -> Largest:
    """Return the largest model of `scale` on `stages` devices (NAIVE: one, without re-materialisation or
    micro-batches).

    Args:
        scale: sizes of its family.
        stages: number of devices.
        is_planned: whether to report the memory that the division predicts instead of training.
    """
    units = largest_fitting(lambda count: _fits(scale, stages, count * scale.unit), _guess(scale, stages))
    layers = units * scale.unit
    measure = _predict_memory if is_planned else _train
    sizes = measure(scale, stages, layers) if layers else {"parameters": 0, "activation_bytes": 0, "fullest": 0}
    return Largest(family=scale.family, stages=stages, layers=layers, memory=scale.memory, **sizes)


def largest_fitting(fits: Callable[[int], bool], guess: int) -> int:
    """Return the largest number that fits, if all smaller ones do; 0 if 1 does not.

    The search starts at `guess`, doubles its stride until it passes the limit, and then bisects, because every try
    traces all operations of a model.
    """
    fit, stride = 0, 1
    if fits(guess):
        while fits(guess + stride):
            guess, stride = guess + stride, 2 * stride
        fit, misfit = guess, guess + stride
    else:
        misfit = guess
        while misfit > stride and not fits(misfit - stride):
            misfit, stride = misfit - stride, 2 * stride
        fit = max(0, misfit - stride)
    while misfit - fit > 1:
        middle = (fit + misfit) // 2
        fit, misfit = (middle, misfit) if fits(middle) else (fit, middle)
    return fit


def _guess(scale: Scale, stages: int) -> int:
    """Return the units of layers that fill all devices, from the bytes of one and of two units."""
    one, two = (_bytes(_subject(scale, stages, units * scale.unit)) for units in (1, 2))
    return max(1, int(1 + (scale.memory * max(1, stages) - one) / (two - one)))


def _bytes(model: PartitionProblem) -> int:
    """Return the bytes of weights and of the activations of one micro-batch, without re-materialisation."""
    return model.weight_bytes(0, len(model.costs)) + model.kept_bytes(0, len(model.costs))


def _subject(scale: Scale, stages: int, layers: int) -> PartitionProblem:
    samples = micro_batch_sizes(scale.samples, _config(scale, stages).micro_batches)[0]
    example = resized(scale.batch(1)[0], samples)
    return partition_problem(on_meta(scale.build_without_memory(layers)), example, torch.device("cpu"))


def _config(scale: Scale, stages: int) -> PipelineConfig:
    policy: Rematerialise = "never" if stages == NAIVE else "always"
    return PipelineConfig(
        begins=None,
        micro_batches=1 if stages == NAIVE else scale.micro_batches,
        schedule="gpipe",
        rematerialise=policy,
        costs="estimated",
        team=_team(scale, stages),
    )


def _team(scale: Scale, stages: int) -> DeviceGroup:
    return DeviceGroup(memory=(scale.memory,) * max(1, stages))


def _fits(scale: Scale, stages: int, layers: int) -> bool:
    try:
        _divided(_subject(scale, stages, layers), scale, stages)
    except DoesNotFit:
        return False
    return True


def _divided(problem: PartitionProblem, scale: Scale, stages: int) -> PartitionPlan:
    """Return the division of `problem` among `stages` devices. Raises DoesNotFit."""
    devices = (torch.device("cpu"),) * max(1, stages)
    placement = StagePlacement(group=None, devices=devices, replicas=(tuple(range(len(devices))),))
    return plan_partition(problem, _config(scale, stages), placement)[0][0]


def _predict_memory(scale: Scale, stages: int, layers: int) -> dict[str, int]:
    """Return the parameters of the model, and the memory that the division predicts for its fullest device."""
    problem = _subject(scale, stages, layers)
    plan, held = _divided(problem, scale, stages), _config(scale, stages).held(max(1, stages))
    activations = [
        held.waiting[stage] * boundary + held.kept[stage] * kept + passing
        for stage, (boundary, kept, passing) in enumerate(
            zip(plan.boundary_bytes, plan.kept_bytes, plan.passing_bytes, strict=True)
        )
    ]
    return {
        "parameters": sum(p.numel() for p in problem.skeleton.parameters()),
        "activation_bytes": max(activations),
        "fullest": max(sum(pair) for pair in zip(activations, plan.weight_bytes, strict=True)),
    }


def _train(scale: Scale, stages: int, layers: int) -> dict[str, int]:
    """Train a step with a process per stage; return the model's parameters and the memory of the fullest process."""
    nodes = equal_nodes(max(1, stages), max(1, stages))
    return measure_on(nodes, partial(_hold, scale, stages, layers), dict[str, int])


def _hold(scale: Scale, stages: int, layers: int, group: Group) -> dict[str, int]:
    """Run one stage and count the memory of the model's second step."""
    config = _config(scale, stages)
    inputs, targets = scale.batch(scale.samples)
    pipeline = Pipeline(
        scale.build_without_memory(layers),
        inputs,
        scale.loss,
        micro_batches=config.micro_batches,
        on=group if group.size > 1 else [group.device],
        schedule=config.schedule,
        rematerialise=config.rematerialise,
        costs=config.costs,
        team=config.team,
        weigh=scale.weigh,
    )
    pipeline.step(inputs, targets)
    with LiveBytes() as live:
        pipeline.step(inputs, targets)
    parameters = list(pipeline.parameters())
    sizes = [sum(p.numel() for p in parameters), live.peak, sum(p.nbytes for p in parameters)]
    return _held(group, sizes)


def _held(group: Group, sizes: list[int]) -> dict[str, int]:
    rows = [decode_json(row, list[int]) for row in group.all_gather_bytes(msgspec.json.encode(sizes))]
    return {
        "parameters": sum(count for count, _, _ in rows),
        "activation_bytes": max(peak for _, peak, _ in rows),
        "fullest": max(peak + WEIGHT_COPIES * weights for _, peak, weights in rows),
    }
