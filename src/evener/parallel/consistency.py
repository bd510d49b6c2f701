"""Before a pass the ranks compare what they are about to compute: a difference would hang them, or go unnoticed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from evener.comm.group import Group
from evener.errors import InvalidInput


class Intention(msgspec.Struct, frozen=True):
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


def intention(replica: int, samples: int, inputs: Sequence[Tensor], training: bool, random: bool) -> Intention:
    """What this rank is about to compute."""
    described = tuple((tuple(x.shape), str(x.dtype)) for x in inputs)
    return Intention(replica, samples, described, training, _random_state(inputs[0].device) if random else "")


def agree(group: Group, own: Intention) -> list[int]:
    """The number of samples of every replica, once all ranks of `group` are about to compute the same.

    Raises:
        InvalidInput: they are not; says who and what.
    """
    rows = [msgspec.json.decode(row, type=Intention) for row in group.all_gather_bytes(msgspec.json.encode(own))]
    first: dict[int, tuple[int, Intention]] = {}
    for rank, row in enumerate(rows):
        other, expected = first.setdefault(row.replica, (rank, row))
        if row != expected:
            _refuse(group.nodes[other], expected, group.nodes[rank], row)
    return [first[replica][1].samples for replica in sorted(first)]


def _refuse(one: str, expected: Intention, other: str, found: Intention) -> None:
    if found.inputs != expected.inputs:
        what = f"inputs {expected.inputs} and {found.inputs}"
    elif found.training != expected.training:
        what = "one model in training and one in evaluation mode"
    else:
        what = "random generators in different states; call torch.manual_seed alike on all ranks"
    raise InvalidInput(f"nodes {one} and {other} of one replica have to compute the same, but have {what}")


def _random_state(device: torch.device) -> str:
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()
