"""Failures of a device, which is full or lost: their recognition, and the errors that explain them to the user.

PyTorch raises them wherever a device computes, so also inside the task's own code. That code, and Evener itself, may
raise another error from them. So the causes of an error are examined as well.
"""

from __future__ import annotations

from evener.records.errors import DeviceLost, DoesNotFit, Interrupted, words_of
from evener.system.memory import is_out_of_memory


def failure_behind(error: BaseException, device: str) -> BaseException | None:
    """Return the error, `error` itself or one of its causes, by which `device` is full or lost; None without one."""
    cause: BaseException | None = error
    while cause is not None and not (is_out_of_memory(cause) or _is_lost(cause, device)):
        cause = cause.__cause__
    return cause


def explained_failure(
    error: BaseException, device: str, *, node: str, rank: str = "", at: str = "", advice: str
) -> DoesNotFit | DeviceLost | None:
    """Return the error that tells the user of the failed device behind `error`.

    Args:
        error: error of a rank, or of the node of an agreement.
        device: its device.
        node: name of its node.
        rank: clause with its number; empty in an agreement.
        at: clause with its step; empty before the first.
        advice: remedy where the memory is full.

    Returns:
        The error; None if no failure of the device is behind `error`, or if `error` is such an error already.
    """
    if isinstance(error, DoesNotFit | DeviceLost | Interrupted):
        return None
    failure = failure_behind(error, device)
    if failure is None:
        return None
    if is_out_of_memory(failure):
        return DoesNotFit(f"node {node} ran out of memory ({failure}); {advice}")
    return device_lost(device, words_of(failure), node=node, rank=rank, at=at)


def device_lost(device: str, why: str, *, node: str, rank: str = "", at: str = "") -> DeviceLost:
    """Return the error of a node that has lost `device`; for the other arguments see `explained_failure`."""
    return DeviceLost(f"node {node}{rank} lost its device {device}{at}: {why}", (node,))


def _is_lost(error: BaseException, device: str) -> bool:
    if device == "cpu":
        return False
    from evener.system import accelerators  # loads PyTorch, which computes on the device anyway

    return accelerators.is_lost(error)
