"""Checkpoints: everything a run needs to go on, on any number of nodes; written whole or not at all.

    DIR/step-00000120/model.safetensors       weights and running statistics
    DIR/step-00000120/optimizer.safetensors   the optimiser's tensors, `<parameter index>.<name>`
    DIR/step-00000120/state.json              step, settings that decide the order of samples, optimiser's numbers ...
    DIR/step-00000120/SHA256SUMS              of the three files, as `sha256sum --check` reads it

A checkpoint is made under another name and renamed when all of it is on the disk, so a folder `step-...` is complete.
One that was damaged is set aside as `damaged-step-...` before a run goes on from the one before it. Sampler and random
states are functions of (seed, step), so the step is all that has to be kept of them. No pickle.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from evener.records.atomic import atomic_draft
from evener.records.decoding import decode_json
from evener.records.errors import CannotWrite, InvalidFile, InvalidInput, TrainingFailed, first_line
from evener.records.record import WEIGHTS
from evener.records.schema import Noun, read_noun, write_noun
from evener.training.checkpoint_folder import checkpoints_in, refuse_other_settings, require_checkpoint

_MAX_CHECKPOINTS = 2
_FILES = (WEIGHTS, "optimizer.safetensors", "state.json")
_SUMS = "SHA256SUMS"
_SAME = ("task", "seed", "batch_size", "accumulate", "samples", "precision", "parts")
"""Settings without which a resumed run would take other samples."""
_OTHER = "other."
"""Begins the names of tensors of an optimiser's state dict that belong to no parameter."""


class WholeModel(Protocol):
    """A model, whatever part of it a rank holds, for checkpoints."""

    def gather_weights(self) -> dict[str, Tensor]:
        """Return the state dict of the whole model, on the ranks that write one; every rank calls this."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load the state dict of the whole model. Raise InvalidInput if it belongs to another model."""
        ...


class WholeOptimizer(Protocol):
    """The optimiser of such a model, for checkpoints."""

    def gather(self) -> dict[str, Any]:
        """Return the state dict of an optimiser of the whole model; every rank calls this."""
        ...

    def load(self, whole: dict[str, Any]) -> None:
        """Load such a state dict."""
        ...


class CheckpointState(Noun, frozen=True, kw_only=True):
    """The part of a checkpoint that is not tensors.

    Attributes:
        step: last step that the weights contain.
        batch_size: samples of a step, in `accumulate` micro-batches.
        samples: in the training data.
        parts: relative parts of stationary data, one a rank; None for data that every rank reads.
        groups: the optimiser's parameter groups.
        others: further entries of the optimiser's state dict that are not tensors.
        attributes: numbers in Python that model, loss and optimiser changed, as `owner.attribute`.
        unsaved: tensors that belong to those numbers and that the checkpoint does not hold.
        numbers: the optimiser's state that is not tensors, `<parameter index>.<name>`.
        scheduler: its state; None without one.
        scaler: of the loss; empty without one.
    """

    task: str
    step: int
    seed: int
    batch_size: int
    accumulate: int
    samples: int
    precision: str
    parts: list[int] | None = None
    groups: list[dict[str, Any]] = []
    others: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    unsaved: list[str] = []
    numbers: dict[str, Any] = {}
    scheduler: dict[str, Any] | None = None
    scaler: dict[str, Any] = {}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The content of a checkpoint: copies on the CPU, which nothing else changes.

    Attributes:
        state: what is no tensor.
        weights: state dict of the whole model.
        optimizer: its tensors, `<parameter index>.<name>`.
    """

    state: CheckpointState
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]

    @staticmethod
    def of(
        state: CheckpointState,
        weights: Mapping[str, Tensor],
        optimizer: Mapping[str, Any],
        scheduler: LRScheduler | None,
        scaler: torch.amp.GradScaler,
    ) -> Checkpoint:
        """Return a copy of the current state.

        Args:
            state: what is no tensor; what belongs to the optimiser, schedule and scaler is filled in here.
            weights: state dict of the whole model.
            optimizer: state dict of an optimiser of the whole model.
            scheduler: of the learning rate.
            scaler: of the loss.

        Raises:
            TrainingFailed: the state of one of them is no plain value.
        """
        tensors, numbers = flatten(optimizer["state"])
        others = {name: value for name, value in optimizer.items() if name not in ("state", "param_groups")}
        apart_tensors = {name: value for name, value in others.items() if isinstance(value, Tensor)}
        tensors |= {f"{_OTHER}{name}": value for name, value in apart_tensors.items()}
        full = msgspec.structs.replace(
            state,
            groups=[plain(group, "the optimiser") for group in optimizer["param_groups"]],
            others=plain({k: v for k, v in others.items() if k not in apart_tensors}, "the optimiser"),
            attributes=plain(state.attributes, "the task"),
            numbers=plain(numbers, "the optimiser"),
            scheduler=None if scheduler is None else plain(scheduler.state_dict(), "the learning-rate schedule"),
            scaler=plain(scaler.state_dict(), "the loss scaler"),
        )
        return Checkpoint(state=full, weights=_copies(weights), optimizer=_copies(tensors))

    def restore(
        self,
        model: WholeModel,
        optimizer: WholeOptimizer,
        scheduler: LRScheduler | None,
        scaler: torch.amp.GradScaler,
    ) -> None:
        """Bring model, optimiser, schedule and scaler to this state. Raise InvalidInput if it is of another model."""
        model.load_weights(self.weights)
        groups = [
            {k: tuple(v) if isinstance(v, list) and k != "params" else v for k, v in g.items()}
            for g in self.state.groups
        ]
        others = {
            **revived(self.state.others),
            **{name.removeprefix(_OTHER): one for name, one in self.optimizer.items() if name.startswith(_OTHER)},
        }
        tensors = {name: one for name, one in self.optimizer.items() if not name.startswith(_OTHER)}
        optimizer.load({**others, "state": unflatten(tensors, self.state.numbers), "param_groups": groups})
        if scheduler is not None and self.state.scheduler is not None:
            scheduler.load_state_dict(revived(self.state.scheduler))
        scaler.load_state_dict(self.state.scaler)


class Checkpoints:
    """The checkpoints of one run in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, checkpoint: Checkpoint) -> Path:
        """Write `checkpoint`, keep the previous one, delete older ones, and return its folder.

        Raises:
            OSError, SafetensorError: the disk is full or cannot be written to; what was there stays.
        """
        target = self.folder / f"step-{checkpoint.state.step:08d}"
        if target.exists():
            return target
        with atomic_draft(target) as draft:
            draft.mkdir()
            save_weights(checkpoint.weights, draft / WEIGHTS)
            save_weights(checkpoint.optimizer, draft / "optimizer.safetensors")
            write_noun(checkpoint.state, draft / "state.json")
            write_sums(draft, _FILES)
        for old in checkpoints_in(self.folder)[:-_MAX_CHECKPOINTS]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def set_aside_damaged(self) -> list[Path]:
        """Rename damaged checkpoints, from the newest to the first intact one; return the new paths."""
        renamed = []
        for folder in reversed(checkpoints_in(self.folder)):
            if is_sound(folder, _FILES):
                break
            aside = folder.with_name(f"damaged-{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            renamed.append(folder.replace(aside))
        return renamed

    @property
    def is_empty(self) -> bool:
        """Whether there is no checkpoint yet."""
        return not checkpoints_in(self.folder)

    def latest(self) -> tuple[Path, CheckpointState]:
        """Return the newest complete checkpoint. Raise MissingFile if there is none."""
        require_checkpoint(self.folder)
        newest = checkpoints_in(self.folder)[-1]
        return newest, read_noun(newest / "state.json", CheckpointState)

    def load(
        self,
        folder: Path,
        state: CheckpointState,
        model: WholeModel,
        optimizer: WholeOptimizer,
        scheduler: LRScheduler | None,
        scaler: torch.amp.GradScaler,
    ) -> None:
        """Bring model, optimiser, schedule and scaler to the state of the checkpoint in `folder`.

        Raises:
            InvalidFile: a file is damaged or belongs to another model.
        """
        try:
            weights = load_file(folder / WEIGHTS)
            tensors = load_file(folder / "optimizer.safetensors")
            whole = Checkpoint(state=state, weights=weights, optimizer=tensors)
            whole.restore(model, optimizer, scheduler, scaler)
        except (SafetensorError, OSError, InvalidInput) as error:
            raise InvalidFile(f"checkpoint {folder} does not fit this model: {first_line(error)}") from error


def _sum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path, names: Sequence[str]) -> None:
    """Write the checksums of files in `folder`, as `sha256sum --check` reads them."""
    (folder / _SUMS).write_text("".join(f"{_sum_of(folder / name)}  {name}\n" for name in names))


def is_sound(folder: Path, names: Sequence[str]) -> bool:
    """Return whether files in `folder` match their checksums."""
    try:
        lines = (folder / _SUMS).read_text().splitlines()
        return all(f"{_sum_of(folder / name)}  {name}" in lines for name in names)
    except (OSError, ValueError):
        return False


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU; tensors that share memory share it in the copy, too."""
    made: dict[tuple[int, torch.Size, tuple[int, ...]], Tensor] = {}
    copies = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if key not in made:
            made[key] = tensor.detach().to("cpu", copy=True)
        copies[name] = made[key]
    return copies


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a state dict."""
    save_file(apart(weights), path)


def apart(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict that safetensors can write: tensors that share memory, such as tied weights, are copied."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in weights.items():
        place = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.detach().clone() if place in seen else tensor.detach().contiguous()
        seen.add(place)
    return separate


def refuse_other_run(saved: CheckpointState, now: CheckpointState, folder: Path) -> None:
    """Raise InvalidInput if the checkpoint was made with settings that would change the order of samples."""
    before, after = ({name: getattr(state, name) for name in _SAME} for state in (saved, now))
    refuse_other_settings(before, after, folder)
    if saved.unsaved:
        raise InvalidInput(f"cannot resume from {folder}: {words_of_unsaved(saved.unsaved)}")


def words_of_unsaved(names: Sequence[str]) -> str:
    """Say which tensors a checkpoint does not hold, and how it would."""
    return f"it does not hold {', '.join(names)}: register such tensors as buffers (register_buffer)"


def require_writable(model: nn.Module) -> nn.Module:
    """Return `model`. Raise InvalidInput where safetensors files cannot hold its state dict."""
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            raise InvalidInput(
                f"{name} of the model's state dict is a {type(tensor).__name__}, and a safetensors file holds tensors "
                "alone: let get_extra_state return a tensor"
            )
        if tensor.dtype == torch.complex128:
            raise InvalidInput(
                f"{name} is complex128, which a safetensors file cannot hold: use complex64 and another --precision "
                "than fp64, or a program that calls evener.join() and writes its weights itself"
            )
    return model


def write_weights(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a model's weights into a run's folder. Raises CannotWrite: the disk is full or gone."""
    path = folder / WEIGHTS
    try:
        save_weights(weights, path)
    except (OSError, SafetensorError) as error:
        raise CannotWrite(path, error, "; checkpoints that were written before are kept") from error


_NOT_FINITE = "not finite"
"""Key of numbers that JSON has no word for."""


def flatten(state: Mapping[int, Mapping[str, Any]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an optimiser's state, and its other values, by `<parameter index>.<name>`.

    Tensors of a list, as LBFGS keeps them, are `<parameter index>.<name>#<place>`; the list itself has None there.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for index, named in state.items():
        for name, value in named.items():
            key = f"{index}.{name}"
            if isinstance(value, Tensor):
                tensors[key] = (value.to_dense() if value.is_sparse else value).contiguous()
            elif isinstance(value, list | tuple):
                places = {f"{key}#{place}": one for place, one in enumerate(value) if isinstance(one, Tensor)}
                tensors |= {place: one.contiguous() for place, one in places.items()}
                values[key] = [None if isinstance(one, Tensor) else one for one in value]
            else:
                values[key] = value
    return tensors, values


def unflatten(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the state that `flatten` took."""
    state: dict[int, dict[str, Any]] = {}
    for key, value in (*values.items(), *tensors.items()):
        index, name = key.split(".", 1)
        name, _, place = name.partition("#")
        entry = state.setdefault(int(index), {})
        if place:
            entry[name][int(place)] = value
        else:
            entry[name] = list(value) if isinstance(value, list) else value
    return state


def plain(value: Any, owner: str) -> Any:
    """Return `value` of `owner` as plain JSON values. Raise TrainingFailed if that is impossible."""
    try:
        return decode_json(msgspec.json.encode(_finite(value), enc_hook=_number))
    except (TypeError, ValueError) as error:
        raise TrainingFailed(
            f"cannot write a checkpoint: the state of {owner} holds {error}; let its state_dict return numbers, texts, "
            "lists and dicts of these, or tensors that are in no list or dict of their own"
        ) from error


def revived(value: Any) -> Any:
    """Return the value that `plain` took, with its non-finite numbers."""
    if isinstance(value, dict):
        if set(value) == {_NOT_FINITE}:
            return float(value[_NOT_FINITE])
        return {key: revived(one) for key, one in value.items()}
    return [revived(one) for one in value] if isinstance(value, list) else value


def _finite(value: Any) -> Any:
    """Return `value` with strings for non-finite numbers: JSON has none, and the best loss starts as one."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_NOT_FINITE: str(value)}
    return value


def _number(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError(f"a {type(value).__name__}, which is no plain value")
