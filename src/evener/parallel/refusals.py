"""Checks that refuse models that cannot be divided, and ranks that are about to do different things.

    untraceable              values decide what the model does, or it uses something other than torch operations
    refuse_lazy              a module gets its shapes from the first batch
    refuse_parts_of_batches  a module has to see all samples, but only gets those of a replica
    refuse_ties              two layers share a weight but need different parts of it
    refuse_parts             evaluation, or another shape, needs other parts of a weight than training
    refuse_sharded_hooks     the user has a hook on the gradient of a divided weight
    tensors_in_order         layers are divided but the inputs are not a sequence of tensors
    gather_sample_counts, require_same  ranks differ: they would hang, or silently train something else

`drawn_ops.py` refuses random numbers that replicas cannot share, and `new_values.py` changes in place that cannot be
divided. An operation that cannot be divided is not refused: its kind is `other`, and every rank computes it whole
(`op_registry.py`). A pipeline also refuses an order of modules that its cut does not allow (`stage_layout.py:
stages_in`), and modules on the meta device that cannot be initialised (`stage_modules.py: initialise`).
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from evener.comm.group import Group
from evener.oracle.division.plan import Shard
from evener.records.decoding import decode_json
from evener.records.errors import InvalidInput, text_of
from evener.records.single_sample_error import is_of_lone_sample, lone_sample_sentence
from evener.system import accelerators
from evener.tracer.ir import TracedModel, assign, record
from evener.tracer.meta_model import attribute, storage_of
from evener.tracer.tracing import NotTraceable


@contextmanager
def untraceable(refusal: str) -> Iterator[None]:
    """Refuse a model that cannot be traced, with the line that prevents it."""
    try:
        yield
    except NotTraceable as error:
        if is_of_lone_sample(text_of(error)):
            raise InvalidInput(lone_sample_sentence("")) from error.__cause__
        raise InvalidInput(f"{refusal}, because of {error}") from error.__cause__


def new_states(traced: TracedModel, model: nn.Module, changes: Callable[[fx.Node], bool]) -> dict[str, fx.Node]:
    """Return by name the nodes that compute new values of buffers, except nodes that change a buffer in place.

    Raises InvalidInput if the model changes a part of a buffer, or a parameter.
    """
    states = {str(node.args[1]): node.args[2] for node in traced.operations if node.target is assign}
    for held in [node for node in traced.graph.nodes if node.op == "get_attr" and node.target in traced.states]:
        last, name = traced.changed.get(storage_of(record(held).value)), str(held.target)
        if name in states or last is None or last.op == "call_module" or changes(last):
            continue
        value = record(last).value
        if not isinstance(value, Tensor) or value.shape != record(held).value.shape:
            raise InvalidInput(f"the model changes part of {name} ({record(last).line}), which cannot be divided")
        if isinstance(attribute(model, name), nn.Parameter):
            raise InvalidInput(f"the model changes {name} itself ({record(last).line}), which cannot be divided")
        states[name] = last
    return {name: node for name, node in states.items() if isinstance(node, fx.Node)}


def refuse_lazy(model: nn.Module) -> nn.Module:
    """Return `model`. Raises InvalidInput if a module in it needs a first batch to know its shapes."""
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(parameter):
            kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise InvalidInput(
                f"{name} of the model ({kind}) gets its shape from the first batch, which differs between nodes: run "
                "one batch through the model first, in Task.model, or in a program before the optimizer is made"
            )
    return model


def refuse_parts_of_batches(model: nn.Module) -> None:
    """Raise InvalidInput if a module's result for some samples differs from that for all samples."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise InvalidInput(
                f"{name} ({kind}, without running statistics) evaluates with statistics of the batch, of which every "
                "replica has a part: set track_running_stats=True, or use a strategy that does not divide samples"
            )
        if getattr(module, "max_norm", None) is not None and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise InvalidInput(
                f"{name} ({kind}, with max_norm) rescales the rows that a batch uses, and every replica has only a "
                "part of the batch: use a strategy that does not divide samples"
            )


def refuse_ties(model: nn.Module, shards: Mapping[str, Shard]) -> None:
    """Raise InvalidInput if layers that share a weight would hold different parts of it."""
    first: dict[int, str] = {}
    for name in shards:
        other = first.setdefault(id(operator.attrgetter(name)(model)), name)
        if shards[name].layout != shards[other].layout:
            raise InvalidInput(f"{other} and {name} are the same weight, but their layers need different parts of it")


def refuse_parts(model: nn.Module, held: Mapping[str, Shard], needed: Mapping[str, Shard]) -> None:
    """Raise InvalidInput if a divided weight is `needed` in another layout than it is `held`."""
    find = operator.attrgetter
    split = {id(find(name)(model)): shard for name, shard in held.items() if shard.layout.state == "split"}
    for name, shard in needed.items():
        shard_held = split.get(id(find(name)(model)), shard)
        if shard_held.layout != shard.layout:
            raise InvalidInput(
                f"{shard_held.name} is divided in training, but {name} needs it undivided in another mode or shape"
            )


def refuse_sharded_hooks(names: Sequence[str], shards: Mapping[str, Shard]) -> None:
    """Raise InvalidInput if the user has a gradient hook on a parameter of which ranks hold parts."""
    for name in names:
        if name in shards and shards[name].layout.state == "split":
            raise InvalidInput(
                f"{name} has a hook on its gradient, but every rank would have only a part of the gradient"
            )


def tensors_in_order(inputs: Any) -> Sequence[Tensor]:
    """Return `inputs` as a sequence of tensors. Raises InvalidInput if they are something else."""
    if isinstance(inputs, Tensor):
        return [inputs]
    if isinstance(inputs, tuple | list) and all(isinstance(x, Tensor) for x in inputs):
        return inputs
    raise InvalidInput(f"dividing layers needs a model that takes tensors as inputs, not a {type(inputs).__name__}")


class Pass(msgspec.Struct, frozen=True):
    """The next computation of one rank.

    Attributes:
        replica: Index of the rank's replica.
        samples: Number of samples in the replica's batch.
        inputs: Shape and dtype of every input.
        training: Whether modules are in training mode.
        random: Digest of the random generator's state, if random numbers are needed.
    """

    replica: int
    samples: int
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    training: bool
    random: str

    @classmethod
    def of(
        cls, replica: int, samples: int, inputs: Sequence[Tensor], training: bool, draws_on: torch.device | None
    ) -> Pass:
        """Describe what this rank is about to compute; `draws_on` is the device that draws random numbers for it."""
        described = tuple((tuple(x.shape), str(x.dtype)) for x in inputs)
        return cls(replica, samples, described, training, _random_state(draws_on) if draws_on is not None else "")


def gather_sample_counts(group: Group, local: Pass) -> list[int]:
    """Return the number of samples of every replica, after checking that all ranks of `group` compute the same.

    Raises:
        InvalidInput: Ranks differ. The error names the ranks and the difference.
    """
    rows = [decode_json(row, Pass) for row in group.all_gather_bytes(msgspec.json.encode(local))]
    first: dict[int, tuple[int, Pass]] = {}
    for rank, row in enumerate(rows):
        other, expected = first.setdefault(row.replica, (rank, row))
        if row != expected:
            what = _difference(expected, row)
            ranks = f"nodes {group.nodes[other]} and {group.nodes[rank]} of one replica"
            raise InvalidInput(f"{ranks} must compute the same, but have {what}")
    return [first[replica][1].samples for replica in sorted(first)]


def require_same(gather: Callable[[bytes], list[bytes]], what: str, value: str) -> None:
    """Raise InvalidInput unless all processes that `gather` reaches have the same `value`."""
    digest = hashlib.blake2b(value.encode(), digest_size=16).digest()
    for rank, other in enumerate(gather(digest)):
        if other != digest:
            raise InvalidInput(f"{what} is not the same on all ranks: this one and rank {rank} differ")


def _difference(expected: Pass, actual: Pass) -> str:
    if actual.inputs != expected.inputs:
        return f"inputs {expected.inputs} and {actual.inputs}"
    if actual.training != expected.training:
        return "one model in training and one in evaluation mode"
    return "random generators in different states; call torch.manual_seed with the same seed on all ranks"


def _random_state(device: torch.device) -> str:
    state = accelerators.generators(device)[-1].get_state()
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()
