"""Losses of Ultralytics' models over the images of all ranks: each part divided by what one process would divide by.

A part of a rank's loss is a sum S_r over its n_r images, divided by a count C_r of that rank; where one process has a
count C of the whole batch. The mean of the whole is  sum_r (C_r / C) (S_r / C_r), and detection multiplies it by the
number N of images, a rank by n_r. So a rank's part is multiplied by C_r/C N/n_r. What the ranks tell each other, in one
exchange for every criterion and batch, is their counts and the values of their parts: all of them know the loss of one
process afterwards, and each has its own addend of the gradient.

    images      of the rank                            means over images
    targets     sum of the target scores, 1 at least   box, class, distance and angle
    foreground  anchors that were given an object      masks, key points
    visible     key points                             the likelihood of their errors, which is cut off below 0
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from ultralytics.utils.loss import E2EDetectLoss, E2ELoss, v8ClassificationLoss, v8DetectionLoss

from evener.comm.group import Group
from evener.records.errors import InvalidInput
from evener.system import accelerators

LossParts: TypeAlias = tuple[Tensor, dict[str, Tensor]]
"""A vector whose sum is the loss, or the loss; and its parts by name, without gradients."""
Criterion: TypeAlias = Callable[[Any, dict[str, Any]], LossParts]
"""Of predictions and a batch."""
Count = Literal["images", "targets", "foreground", "visible"]

_KNOWN = ("ultralytics.", "torch.")
"""Packages whose losses are known."""
_COUNTS: tuple[Count, ...] = ("images", "targets", "foreground", "visible")
_DIVISORS: dict[str, Count] = {
    "loss": "images",
    "box_loss": "targets",
    "cls_loss": "targets",
    "dfl_loss": "targets",
    "l1_loss": "targets",
    "angle_loss": "targets",
    "seg_loss": "foreground",
    "sem_loss": "images",
    "pose_loss": "foreground",
    "kobj_loss": "foreground",
    "rle_loss": "visible",
}
"""By the name of a part: what it is divided by."""


class RankImages(NamedTuple):
    """The images of a batch that a rank has.

    Attributes:
        group: the ranks.
        number: of its images; 0 for a rank whose one image counts for nothing.
    """

    group: Group
    number: int


Images = Callable[[], RankImages]
"""Returns this rank's images of the batch that the criterion is called with."""


def share_criterion(criterion: Any, images: Images) -> Criterion:
    """`criterion` over the images of all ranks, which call it alike; it is changed in place, or wrapped.

    Only functions are attached to it: they survive copies of the model.

    Raises:
        InvalidInput: the divisors of this criterion are unknown, as those of the user's own are.
    """
    if own := _own_parts(criterion):
        raise _is_own(own[0])
    if isinstance(criterion, v8ClassificationLoss):
        return _shared_mean(criterion, images)
    ends = isinstance(criterion, E2ELoss | E2EDetectLoss)
    for one in (criterion.one2many, criterion.one2one) if ends else (criterion,):
        if not isinstance(one, v8DetectionLoss) or not set(one.loss_names) <= _DIVISORS.keys():
            raise InvalidInput(
                f"the loss {type(one).__name__} is computed over whole batches, which nodes cannot share: "
                "train it on one node"
            )
        _share_detection(one, images)
    return criterion  # type: ignore[no-any-return]


def require_known_loss(model: Any) -> None:
    """Raise InvalidInput if the loss of a model of Ultralytics is computed by a method of the user."""
    for name in ("loss", "forward"):  # `forward` calls `loss`
        method = vars(model).get(name) or getattr(type(model), name, type(model))
        if not (method.__module__ or "").startswith(_KNOWN):
            raise _is_own(method.__qualname__)


def _is_own(name: str) -> InvalidInput:
    return InvalidInput(
        f"the loss {name} is your own, and nodes cannot know by which counts its parts are divided: train it on one "
        "node"
    )


def _own_parts(criterion: Any) -> list[str]:
    """Return the names of the classes and functions of a criterion that neither Ultralytics nor PyTorch defines."""
    ends = (criterion.one2many, criterion.one2one) if isinstance(criterion, E2ELoss | E2EDetectLoss) else ()
    parts: list[Any] = [type(one) for one in (criterion, *ends)]
    for value in [value for one in (criterion, *ends) for value in vars(one).values()]:
        if isinstance(value, nn.Module) or inspect.isroutine(value):
            parts.append(type(value) if isinstance(value, nn.Module) else value)
    return [one.__qualname__ for one in parts if not (one.__module__ or "").startswith(_KNOWN)]


def _shared_mean(criterion: Any, images: Images) -> Criterion:
    """A mean over the images."""

    def shared(predictions: Any, batch: dict[str, Any]) -> LossParts:
        loss, items = criterion(predictions, batch)
        parts, items, _ = _over_all(loss.unsqueeze(0), list(items), images(), {})
        return parts[0], items

    return shared


def _share_detection(criterion: Any, images: Images) -> None:
    """Have `criterion.loss` be that of all ranks."""
    own_loss, seen = criterion.loss, dict[str, Tensor]()

    def assigned(_module: Any, _inputs: Any, outputs: Sequence[Tensor]) -> None:
        seen["targets"], seen["foreground"] = outputs[2].sum(), outputs[3].sum()

    def likelihood(_module: Any, inputs: Sequence[Tensor], output: Tensor) -> None:
        seen["visible"], seen["likelihood"] = output.new_full((), len(inputs[0])), output

    def loss(predictions: Any, batch: dict[str, Any]) -> LossParts:
        seen.clear()
        vector, items = own_loss(predictions, batch)
        parts = _completed(criterion, vector / len(predictions["boxes"]), predictions, batch, seen)
        parts, items, number = _over_all(parts, list(items), images(), seen)
        seen.clear()  # a copy of the model must not find tensors of a graph
        return parts * number, items

    criterion.assigner.register_forward_hook(assigned)
    if getattr(criterion, "rle_loss", None) is not None:
        criterion.rle_loss.register_forward_hook(likelihood)
    criterion.loss = loss


def _completed(
    criterion: Any, parts: Tensor, predictions: Any, batch: dict[str, Any], seen: dict[str, Tensor]
) -> Tensor:
    """`parts` with what the criterion leaves out, or cuts off, for reasons that lie in this rank's images alone."""
    by_name = dict(zip(criterion.loss_names, parts.unbind(), strict=True))
    if "sem_loss" in by_name and isinstance(predictions["proto"], tuple) and not seen["foreground"]:
        by_name["sem_loss"] = by_name["sem_loss"] + _semantic_loss(criterion, predictions["proto"][1], batch)
    if "likelihood" in seen:
        by_name["rle_loss"] = seen["likelihood"].to(parts.dtype) * criterion.hyp.rle
    return torch.stack(list(by_name.values()))


def _semantic_loss(criterion: Any, scores: Tensor, batch: dict[str, Any]) -> Tensor:
    """The part for the classes of pixels, which is left out where no anchor was given an object.

    Args:
        criterion: of segmentation.
        scores: of classes by pixel, (N, C, H, W).
        batch: with masks, and the class of every pixel.
    """
    masks = batch["masks"].to(scores.device)
    if criterion.overlap:
        covered = masks != 0
    else:
        owner = batch["batch_idx"].view(-1)
        covered = torch.stack([(masks[owner == image] != 0).any(0) for image in range(len(scores))])
    classes = batch["sem_masks"].to(scores.device).long()
    wanted = F.one_hot(classes, criterion.nc).movedim(3, 1) * covered.unsqueeze(1)
    loss: Tensor = criterion.bcedice_loss(scores, wanted.to(scores.dtype)) * criterion.hyp.box
    return loss


def _over_all(
    parts: Tensor, names: Sequence[str], ranks: RankImages, seen: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The parts of all ranks' loss, with the gradient of this rank's addend; their values; the number of images."""
    local = torch.zeros(len(_COUNTS) + len(names), dtype=torch.float64, device=accelerators.exact(parts.device))
    if ranks.number:
        local[0] = ranks.number
        for index, count in enumerate(_COUNTS[1:], 1):
            local[index] = seen.get(count, local[index])
        local[len(_COUNTS) :] = parts.detach()
    rows = ranks.group.all_gather(local, "normalisers")
    counts = dict(zip(_COUNTS, rows.unbind(1), strict=False))
    weights = torch.stack([_weights(name, counts) for name in names], 1)
    values = (weights * rows[:, len(_COUNTS) :]).sum(0)
    if "rle_loss" in names:
        is_positive = values[names.index("rle_loss")] > 0
        weights[:, names.index("rle_loss")] *= is_positive
        values[names.index("rle_loss")] *= is_positive
    addend, values = parts * weights[ranks.group.rank].to(parts), values.to(parts)
    whole = addend + (values - addend.detach())
    return whole, dict(zip(names, values.unbind(), strict=True)), counts["images"].sum()


def _weights(name: str, counts: dict[Count, Tensor]) -> Tensor:
    """By rank: its count over that of all; of part `name` of the loss."""
    count = counts[_DIVISORS[name]]
    if _DIVISORS[name] == "targets":  # at least 1 on each rank that has images, and over all of them
        return count.clamp(min=1) * (counts["images"] > 0) / count.sum().clamp(min=1)
    weights = count / count.sum().clamp(min=1)
    return weights * (counts["foreground"].sum() > 0) if name == "sem_loss" else weights
