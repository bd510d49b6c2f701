"""Who keeps the others waiting and does not get on: pure.

Work may take much longer than the patience: an epoch of local steps, a gradient of a large batch, weights over a thin
line. So what counts is the time since a node last gave a sign of getting on: bytes that went to it or came from it, a
step done, a piece of work taken or finished. A step itself is without signs: it may take what it is believed to take,
and the patience on top.
"""

from __future__ import annotations

from collections.abc import Mapping

from evener.ps.nodes import NodeRecord


def stragglers(step_seconds: Mapping[NodeRecord, float], patience: float, now: float) -> list[NodeRecord]:
    """Those who should have given a sign of getting on the patience ago.

    Args:
        step_seconds: that one step is believed to take, of each who is at work.
        patience: seconds that everybody waits for one.
        now: seconds.
    """
    return [node for node, seconds in step_seconds.items() if now - node.progress_at > patience + seconds]
