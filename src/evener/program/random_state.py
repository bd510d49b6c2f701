"""Random numbers of a program on several ranks: alike where the program draws for all, its own where a rank computes.

At the beginning of a round all ranks take over the leader's state; what a rank then draws for its own samples, such as
dropout, it draws from a stream of its own.
"""

from __future__ import annotations

import random

import msgspec
import numpy as np
import torch

from evener.comm.group import Group


def take_leaders_state(group: Group, topic: str = "") -> None:
    """Let the processor's generators (torch, Python, NumPy) be in the leader's states; every rank calls this."""
    state = msgspec.msgpack.decode(group.told_by_leader(_state(), topic))
    torch.set_rng_state(torch.frombuffer(bytearray(state[0]), dtype=torch.uint8))
    version, numbers, gauss = state[1]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state[2]
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))


def draw_own(rank: int) -> None:
    """Let torch draw from a stream of this rank's own; the leader goes on as a single process would."""
    if rank > 0:
        torch.manual_seed(int(torch.randint(2**62, ())) + rank)


def _state() -> bytes:
    name, keys, *rest = np.random.get_state()
    numbers = np.asarray(keys, dtype=np.uint32).tobytes()
    return msgspec.msgpack.encode((torch.get_rng_state().numpy().tobytes(), random.getstate(), (name, numbers, *rest)))
