"""Notices that an accelerator finishes no work any more, as after a kernel that never ends.

The thread that trains then waits inside PyTorch for good, and its process looks alive to all others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from evener.system import accelerators

FIRST_SECONDS = 600.0
"""Limit until two steps are known: the first one compiles, and tries kernels."""
_PATIENCES, _STEPS = 4, 6
"""The limit, in patiences and in longest steps. Results are read one step late: a device has at most two steps left."""


class DeviceWatch:
    """Watches the device of a thread that makes steps, from a thread of its own.

    After half of a limit without a step the device is asked to finish what it has been given. If it does, the steps
    wait for something else, such as data or other ranks. If it has not done so by the limit, it hangs. The limit is six
    times the longest step so far, with what lies between two steps, and at least four times the patience.

    Args:
        device: an accelerator.
        patience: seconds of silence after which a node is lost.
        on_hang: called once if the device hangs, with what has happened, for the user.
    """

    def __init__(self, device: torch.device, patience: float, on_hang: Callable[[str], object]) -> None:
        self._device, self._patience, self._on_hang = device, patience, on_hang
        self._over = threading.Event()
        self._count, self._last = 0, time.monotonic()
        self._longest: float | None = None

    @property
    def limit(self) -> float:
        """The seconds without a step after which a device that does not answer hangs."""
        if self._longest is None:
            return max(FIRST_SECONDS, _PATIENCES * self._patience)
        return max(_STEPS * self._longest, _PATIENCES * self._patience)

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._watch, name="evener-device", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._over.set()

    def at_step(self) -> None:
        """Note that a step begins."""
        now = time.monotonic()
        if self._count > 1:  # the first step may compile
            self._longest = max(self._longest or 0.0, now - self._last)
        self._count, self._last = self._count + 1, now

    def _watch(self) -> None:
        answered = self._last
        while not self._over.wait(min(1.0, self._patience / 4)):
            count, half = self._count, self.limit / 2
            if time.monotonic() - max(self._last, answered) < half:
                continue
            if not self._answers(half) and self._count == count and not self._over.is_set():
                self._on_hang(f"it has finished nothing for {time.monotonic() - self._last:.0f} s")
                break
            answered = time.monotonic()

    def _answers(self, seconds: float) -> bool:
        """Return whether the device finishes within `seconds` what it has been given; an error is an answer, too."""
        has_answered = threading.Event()

        def ask() -> None:
            with suppress(RuntimeError):  # the thread that trains gets it as well
                accelerators.synchronize(self._device)
            has_answered.set()

        threading.Thread(target=ask, name="evener-ask-device", daemon=True).start()
        return has_answered.wait(seconds)
