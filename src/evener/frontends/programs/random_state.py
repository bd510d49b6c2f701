"""Random numbers of a program on several ranks: shared for the whole program, local for the samples of a rank.

At the beginning of an epoch all ranks copy the leader's state. A rank then draws for its own samples, such as dropout,
from a local stream. Draws after a `backward()`, such as noise in gradients, and draws of the optimizer change weights,
so all ranks share them.

    batch | forward | backward | noise in gradients | optimizer |  more  | next batch
    local    local     local          shared            shared    shared     local
"""

from __future__ import annotations

import random

import msgspec
import numpy as np
import torch
from torch import Tensor

from evener.comm.group import Group
from evener.records.decoding import decode_msgpack
from evener.system import accelerators


def take_leaders_state(group: Group, topic: str = "") -> None:
    """Copy the leader's states of the CPU generators (torch, Python, NumPy); every rank calls this.

    Ranks with the leader's model of accelerator copy the state of its generator as well.
    """
    state = decode_msgpack(group.broadcast(_state(group.device) if group.is_leader else b"", topic))
    torch.set_rng_state(torch.frombuffer(bytearray(state[0]), dtype=torch.uint8))
    version, numbers, gauss = state[1]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state[2]
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))
    model, of_accelerators = state[3]
    if model == str(accelerators.model_and_units(group.device)):
        for generator, numbers in zip(accelerators.generators(group.device)[1:], of_accelerators, strict=True):
            generator.set_state(torch.frombuffer(bytearray(numbers), dtype=torch.uint8))


class OwnDraws:
    """This rank's local and shared streams of PyTorch's random numbers.

    Args:
        group: the ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._generators = accelerators.generators(group.device)
        self._seed: int | None = None
        self._own: list[Tensor] = []

    def begin(self) -> None:
        """Switch to the local stream; the leader continues as one process would. All ranks call this."""
        before = torch.get_rng_state()
        drawn = int(torch.randint(2**62, ()))
        if self._group.rank > 0:
            torch.manual_seed(drawn + self._group.rank)
        else:
            torch.set_rng_state(before)
        self._seed = int.from_bytes(self._group.broadcast(drawn.to_bytes(8), "the first batch"))

    def leave(self) -> None:
        """Switch to the shared stream; all ranks call this equally often."""
        if self._seed is None:
            return
        if not self._own:
            self._own = [generator.get_state() for generator in self._generators]
        self._seed += 1
        for generator in self._generators:
            generator.manual_seed(self._seed)

    def resume(self) -> None:
        """Switch back to the local stream."""
        for generator, state in zip(self._generators, self._own, strict=False):
            generator.set_state(state)
        self._own = []


def _state(device: torch.device) -> bytes:
    name, keys, *rest = np.random.get_state()
    numbers = np.asarray(keys, dtype=np.uint32).tobytes()
    processor, *others = (one.get_state().numpy().tobytes() for one in accelerators.generators(device))
    accelerator = str(accelerators.model_and_units(device)), others
    return msgspec.msgpack.encode((processor, random.getstate(), (name, numbers, *rest), accelerator))
