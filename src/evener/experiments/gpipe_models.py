"""The two families of models that GPipe was measured on, in sizes for small machines and in those of the paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.models.amoebanet import AmoebaNetD
from evener.models.transformer import Transformer, tokens_in, translation_loss
from evener.parallel.pipeline.micro_batches import Loss, LossWeight
from evener.schema import Part

AMOEBANET, TRANSFORMER = "AmoebaNet-D", "Transformer"
NAIVE = 0
"""Stands for one accelerator without re-materialisation, where a number of stages is meant."""


class PipelineSpeed(Part, frozen=True, kw_only=True):
    """How fast a pipeline trains.

    Attributes:
        family: of models.
        stages: K.
        micro_batches: M.
        samples_per_second: of the median step.
        bubble: idle share of the stages' time in the last step.
    """

    family: str
    stages: int
    micro_batches: int
    samples_per_second: float
    bubble: float


class Scale(Part, frozen=True, kw_only=True):
    """Sizes of one family.

    Attributes:
        family: AmoebaNet-D or Transformer.
        width: filters of AmoebaNet-D; of a Transformer D; in the search.
        length: rows and columns of an image; tokens of a sentence.
        classes: of an image; of a token.
        samples: of a batch in the search for the largest model.
        micro_batches: of that.
        memory: bytes of a device in that search.
        timed_layers: of the model that is timed.
        timed_width: likewise.
        timed_samples: of the batch that is timed.
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
        """Layers by which a model grows."""
        return 3 if self.family == AMOEBANET else 1

    def build_without_memory(self, layers: int) -> nn.Module:
        """A model of so many layers for the search, on the meta device."""
        with torch.device("meta"):
            return self._build(layers, self.width)

    def build_timed(self) -> nn.Module:
        """The model that is timed."""
        return self._build(self.timed_layers, self.timed_width)

    def _build(self, layers: int, width: int) -> nn.Module:
        if self.family == AMOEBANET:
            return AmoebaNetD(layers, width, self.classes)
        heads = max(1, width // 64) * 2
        return Transformer(self.classes, layers, width, heads, 4 * width, dropout=0.0, tied=False)

    def batch(self, samples: int) -> tuple[Any, Tensor]:
        """Inputs and targets: noise, the same on every rank."""
        draw = torch.Generator().manual_seed(0)
        if self.family == AMOEBANET:
            images = torch.randn(samples, 3, self.length, self.length, generator=draw)
            return images, torch.randint(0, self.classes, (samples,), generator=draw)
        source, target, successors = torch.randint(1, self.classes, (3, samples, self.length), generator=draw)
        return (source, target), successors

    @property
    def loss(self) -> Loss:
        """Of the model's outputs and targets."""
        return F.cross_entropy if self.family == AMOEBANET else translation_loss

    @property
    def weigh(self) -> LossWeight:
        """What the loss is a mean over."""
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
"""For a few cores."""
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
"""As in the paper: AmoebaNet-D(18, 256), and Transformer-48 as 24 layers of encoder and of decoder."""
