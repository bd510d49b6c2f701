"""Ranks compare what they are about to compute: a difference would hang them, or go unnoticed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from evener.comm.group import Group
from evener.errors import InvalidInput


class PassSignature(msgspec.Struct, frozen=True):
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


def signature(replica: int, samples: int, inputs: Sequence[Tensor], training: bool, random: bool) -> PassSignature:
    """What this rank is about to compute."""
    described = tuple((tuple(x.shape), str(x.dtype)) for x in inputs)
    return PassSignature(replica, samples, described, training, _random_state(inputs[0].device) if random else "")


def compare_signatures(group: Group, own: PassSignature) -> list[int]:
    """The number of samples of every replica, once all ranks of `group` are about to compute the same.

    Raises:
        InvalidInput: they are not; says who and what.
    """
    rows = [msgspec.json.decode(row, type=PassSignature) for row in group.all_gather_bytes(msgspec.json.encode(own))]
    first: dict[int, tuple[int, PassSignature]] = {}
    for rank, row in enumerate(rows):
        other, expected = first.setdefault(row.replica, (rank, row))
        if row != expected:
            _refuse(group.nodes[other], expected, group.nodes[rank], row)
    return [first[replica][1].samples for replica in sorted(first)]


def require_same(gather: Callable[[bytes], list[bytes]], what: str, value: str) -> None:
    """Raise InvalidInput unless every process of those that `gather` asks has the same `value`."""
    digest = hashlib.blake2b(value.encode(), digest_size=16).digest()
    for rank, other in enumerate(gather(digest)):
        if other != digest:
            raise InvalidInput(f"{what} is not the same on all ranks: this one and rank {rank} differ")


def _refuse(one: str, expected: PassSignature, other: str, found: PassSignature) -> None:
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
