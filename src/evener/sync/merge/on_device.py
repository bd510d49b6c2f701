"""Merging, our way, where the states are PyTorch tensors: one flat tensor per dtype, weighted, part by part.

The same sum as in `stream.py`, in the same order. A GPU works on a part while the host receives the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_PART_BYTES = {"cpu": 1 << 19, "cuda": 1 << 25}
"""Bytes of a source that are merged by one call: what the cache holds, or enough for a kernel to be worth its start."""


class DeviceMerging:
    """One weighted mean of flat tensors in the making.

    Args:
        out: where the result lies in the end, on the device that merges.
        sources: what is merged, on that device or in the host's memory (pinned, so that nobody waits for its copying).
        weights: of the sources, positive; only their ratios matter.
    """

    def __init__(self, out: Tensor, sources: Sequence[Tensor], weights: Sequence[float]) -> None:
        self._out, self._sources = out, sources
        self._ratios = [weight / weights[0] for weight in weights]
        self._share = weights[0] / sum(weights)
        self._done = 0
        self._part = _PART_BYTES.get(out.device.type, 1 << 25) // out.element_size()
        self._is_finite = torch.ones((), dtype=torch.bool, device=out.device)

    @torch.no_grad()
    def advance(self, num_elements: int) -> None:
        """Merge what can be merged now that the first `num_elements` of every source have arrived."""
        while self._done < num_elements:
            stop = min(self._done + self._part, num_elements)
            self._merge(self._done, stop)
            self._done = stop

    def finish(self) -> tuple[int, ...]:
        """Merge the rest, everything having arrived.

        Returns:
            Which sources have to be left out because they are not finite; empty if the result is good. Should finite
            sources have a sum beyond what the dtype holds, that is all of them.
        """
        self.advance(self._out.numel())
        if bool(self._is_finite):
            return ()
        bad = tuple(i for i, source in enumerate(self._sources) if not bool(source.isfinite().all()))
        return bad or tuple(range(len(self._sources)))

    def _merge(self, start: int, stop: int) -> None:
        total = self._out[start:stop]
        total.copy_(self._sources[0][start:stop], non_blocking=True)
        for source, ratio in zip(self._sources[1:], self._ratios[1:], strict=True):
            total.add_(source[start:stop].to(total.device, non_blocking=True), alpha=ratio)
        total.mul_(self._share)
        self._is_finite &= total.isfinite().all()
