"""The memory that the check before the first step needs in double precision, predicted from its first trial."""

from __future__ import annotations

from evener.launch.rank_environment import RankEnvironment
from evener.records.profile import Precision
from evener.system import accelerators

_TIMES = {"fp32": 2, "bf16": 4, "fp16": 4}
"""Bytes of a number in double precision, by that of the first trial, in multiples of its own bytes."""
_USED_PART = 0.9
"""Part of the free memory that a trial may take."""


class TrialMemory:
    """The memory of a rank's device during a trial. It knows nothing of devices whose memory PyTorch does not count.

    Args:
        env: of the rank.
        precision: of the first trial.
    """

    def __init__(self, env: RankEnvironment, precision: Precision) -> None:
        self._device, self._times = env.device, _TIMES.get(precision, 1)
        self._is_counted = accelerators.capabilities(env.device).counts_memory and accelerators.has_float64(env.device)
        self._sharing = sum((one.host, one.device) == (env.node.host, env.node.device) for one in env.nodes)
        self._before = 0
        if self._is_counted:
            accelerators.reset_peak(self._device)
            self._before = accelerators.allocated_bytes(self._device)

    def suffices_for_double(self) -> bool:
        """Return, after the first trial, whether the free memory holds the same trial in double precision."""
        if not self._is_counted:
            return True
        need = self._times * (accelerators.peak_bytes(self._device) - self._before)
        memory = accelerators.memory(self._device)
        return memory is None or need * self._sharing <= _USED_PART * memory[1]
