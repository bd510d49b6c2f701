"""Random layers draw the same numbers however the model is cut, and the same ones again when they are recomputed.

Every random operation draws from a seed made of the step's seed, the micro-batch and its own number in the model. The
generator of the process is left as it was.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_ONE_GENERATOR = threading.RLock()
"""The processor's generator belongs to all threads; stages of one process draw in turn."""


@dataclass
class StageRNG:
    """What a stage's random operations draw from.

    Attributes:
        device: that they run on.
        seed: of the step.
        micro_batch: that is computed.
    """

    device: torch.device
    seed: int = 0
    micro_batch: int = 0

    @contextmanager
    def seeded_for(self, operation: int) -> Iterator[None]:
        """Inside, random numbers are those of `operation` for this step and micro-batch."""
        devices = [self.device] if self.device.type == "cuda" else []
        seed = mix(self.seed, self.micro_batch, operation)
        with _ONE_GENERATOR, torch.random.fork_rng(devices):
            torch.default_generator.manual_seed(seed)
            if devices:
                with torch.cuda.device(self.device):
                    torch.cuda.manual_seed(seed)
            yield


def mix(*numbers: int) -> int:
    """A seed of 63 bits that differs as soon as one of `numbers` does."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
