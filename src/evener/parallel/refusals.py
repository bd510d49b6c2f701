"""What is refused, and why: models that cannot be taken apart, and ranks that are about to do different things.

    untraceable              values decide what the model does, or something is no operation of torch: any division
    refuse_lazy              a module that gets its shapes from the first batch
    refuse_parts_of_batches  a module that has to see all samples, and is given those of a replica
    refuse_ties              a weight of two layers that need different parts of it
    refuse_parts             a weight that evaluation, or another shape, needs otherwise than training
    refuse_divided_hooks     a hook of the user's on the gradient of a weight that is divided
    tensors_in_order         inputs that are no tensors in order, where layers are divided
    agree, require_same      ranks differ: they would hang, or train something else without a word

Random numbers that replicas cannot share are refused where they are drawn (`drawn_ops.py`), and changes in place where
they become new values (`new_values.py`).

What nobody knows how to divide is not refused: it is an operation of kind `other`, done whole (`op_registry.py`). A
pipeline refuses, besides, an order of modules that its cut does not allow (`stage_layout.py: stages_in`), and modules
without memory that cannot be initialised (`stage_modules.py: initialise`).
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
from evener.records.errors import InvalidInput
from evener.tracer.ir import TracedModel, assign, record
from evener.tracer.meta_model import attribute, storage_of
from evener.tracer.tracing import NotTraceable


@contextmanager
def untraceable(refusal: str) -> Iterator[None]:
    """Inside, a model is followed; one that cannot be is refused, with its line."""
    try:
        yield
    except NotTraceable as error:
        raise InvalidInput(f"{refusal}, because of {error}") from error.__cause__


def new_states(traced: TracedModel, model: nn.Module, changes: Callable[[fx.Node], bool]) -> dict[str, fx.Node]:
    """By name, the nodes that make what buffers hold after a pass; but not what `changes` the buffer itself.

    Raises InvalidInput where a buffer changes in part, or a parameter does.
    """
    found = {str(node.args[1]): node.args[2] for node in traced.operations if node.target is assign}
    for held in [node for node in traced.graph.nodes if node.op == "get_attr" and node.target in traced.states]:
        last, name = traced.changed.get(storage_of(record(held).value)), str(held.target)
        if name in found or last is None or last.op == "call_module" or changes(last):
            continue
        value = record(last).value
        if not isinstance(value, Tensor) or value.shape != record(held).value.shape:
            raise InvalidInput(f"the model changes part of {name} ({record(last).line}), which cannot be divided")
        if isinstance(attribute(model, name), nn.Parameter):
            raise InvalidInput(f"the model changes {name} itself ({record(last).line}), which cannot be divided")
        found[name] = last
    return {name: node for name, node in found.items() if isinstance(node, fx.Node)}


def refuse_lazy(model: nn.Module) -> nn.Module:
    """`model`. Raises InvalidInput if a module in it waits for a first batch to know its shapes."""
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(parameter):
            kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise InvalidInput(
                f"{name} of the model ({kind}) gets its shape from the first batch, which every node would see another "
                "of: run one batch through it first, in Task.model, or in a program before the optimizer is made"
            )
    return model


def refuse_parts_of_batches(model: nn.Module) -> None:
    """Raises InvalidInput if a module in `model` does something else with some of the samples than with all of them."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise InvalidInput(
                f"{name} ({kind}, without running statistics) evaluates by those of the batch, of which every replica "
                "has a part: give it track_running_stats=True, or take a strategy that does not divide samples"
            )
        if getattr(module, "max_norm", None) is not None and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise InvalidInput(
                f"{name} ({kind}, with max_norm) shortens the rows that a batch uses, of which every replica has a "
                "part: take a strategy that does not divide samples"
            )


def refuse_ties(model: nn.Module, shards: Mapping[str, Shard]) -> None:
    """Raises InvalidInput if layers that share a weight would hold different parts of it."""
    first: dict[int, str] = {}
    for name in shards:
        other = first.setdefault(id(operator.attrgetter(name)(model)), name)
        if shards[name].layout != shards[other].layout:
            raise InvalidInput(f"{other} and {name} are one weight, of which their layers need different parts")


def refuse_parts(model: nn.Module, held: Mapping[str, Shard], needed: Mapping[str, Shard]) -> None:
    """Raises InvalidInput if a weight is needed in another way than it is `held`, of which ranks have parts."""
    find = operator.attrgetter
    split = {id(find(name)(model)): shard for name, shard in held.items() if shard.layout.state == "split"}
    for name, shard in needed.items():
        own = split.get(id(find(name)(model)), shard)
        if own.layout != shard.layout:
            raise InvalidInput(
                f"{own.name} is divided in training, but {name} needs it undivided in another mode or shape"
            )


def refuse_divided_hooks(names: Sequence[str], shards: Mapping[str, Shard]) -> None:
    """Raises InvalidInput if ranks would have parts of a parameter whose gradient a hook of the user's sees."""
    for name in names:
        if name in shards and shards[name].layout.state == "split":
            raise InvalidInput(f"{name} has a hook on its gradient, of which every rank would have a part only")


def tensors_in_order(inputs: Any) -> Sequence[Tensor]:
    """`inputs` as the tensors that the model takes in order. Raises InvalidInput if they are no such."""
    if isinstance(inputs, Tensor):
        return [inputs]
    if isinstance(inputs, tuple | list) and all(isinstance(x, Tensor) for x in inputs):
        return inputs
    raise InvalidInput(f"layers are divided of models that take tensors in order, not a {type(inputs).__name__}")


class Pass(msgspec.Struct, frozen=True):
    """What one rank is about to compute.

    Attributes:
        replica: that the rank belongs to.
        samples: in the replica's batch.
        inputs: shape and type of every input.
        training: whether modules are in training mode.
        random: digest of the random generator's state, where random numbers are needed.
    """

    replica: int
    samples: int
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    training: bool
    random: str

    @classmethod
    def of(cls, replica: int, samples: int, inputs: Sequence[Tensor], training: bool, is_random: bool) -> Pass:
        """What this rank is about to compute."""
        described = tuple((tuple(x.shape), str(x.dtype)) for x in inputs)
        return cls(replica, samples, described, training, _random_state(inputs[0].device) if is_random else "")


def agree(group: Group, own: Pass) -> list[int]:
    """The number of samples of every replica, once all ranks of `group` are about to compute the same.

    Raises:
        InvalidInput: they are not; says who and what.
    """
    rows = [msgspec.json.decode(row, type=Pass) for row in group.all_gather_bytes(msgspec.json.encode(own))]
    first: dict[int, tuple[int, Pass]] = {}
    for rank, row in enumerate(rows):
        other, expected = first.setdefault(row.replica, (rank, row))
        if row != expected:
            what = _difference(expected, row)
            ranks = f"nodes {group.nodes[other]} and {group.nodes[rank]} of one replica"
            raise InvalidInput(f"{ranks} have to compute the same, but have {what}")
    return [first[replica][1].samples for replica in sorted(first)]


def require_same(gather: Callable[[bytes], list[bytes]], what: str, value: str) -> None:
    """Raise InvalidInput unless every process of those that `gather` asks has the same `value`."""
    digest = hashlib.blake2b(value.encode(), digest_size=16).digest()
    for rank, other in enumerate(gather(digest)):
        if other != digest:
            raise InvalidInput(f"{what} is not the same on all ranks: this one and rank {rank} differ")


def _difference(expected: Pass, found: Pass) -> str:
    if found.inputs != expected.inputs:
        return f"inputs {expected.inputs} and {found.inputs}"
    if found.training != expected.training:
        return "one model in training and one in evaluation mode"
    return "random generators in different states; call torch.manual_seed alike on all ranks"


def _random_state(device: torch.device) -> str:
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()
