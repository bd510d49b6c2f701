"""The steps of a run in bounded memory: a long run sums neighbouring steps, twice as many each time it is full."""

from __future__ import annotations

from collections.abc import Sequence

from evener.record import NodeStep, Step

_CAPACITY = 4096


class StepLog:
    """The steps of a run, at most some thousands of entries.

    Attributes:
        every: steps that one entry sums.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self.every = 1
        self._capacity = capacity
        self._entries: list[Step] = []
        self._open: list[Step] = []

    def add(self, step: Step) -> None:
        """Append one step."""
        self._open.append(step)
        if len(self._open) < self.every:
            return
        self._entries.append(merge(self._open))
        self._open = []
        if len(self._entries) >= self._capacity:
            pairs = zip(self._entries[::2], self._entries[1::2], strict=True)
            self._entries = [merge(pair) for pair in pairs]
            self.every *= 2

    @property
    def entries(self) -> tuple[Step, ...]:
        """All entries, the last perhaps of fewer steps."""
        return (*self._entries, *([merge(self._open)] if self._open else []))


def merge(steps: Sequence[Step]) -> Step:
    """One entry for neighbouring steps: sums, and the mean loss over the samples."""
    if len(steps) == 1:
        return steps[0]
    samples = sum(step.samples for step in steps)
    return Step(
        step=steps[-1].step,
        epoch=steps[-1].epoch,
        samples=samples,
        loss=sum(step.loss * step.samples for step in steps) / samples,
        seconds=sum(step.seconds for step in steps),
        nodes=tuple(_merge_nodes(nodes) for nodes in zip(*(step.nodes for step in steps), strict=True)),
    )


def _merge_nodes(nodes: Sequence[NodeStep]) -> NodeStep:
    return NodeStep(**{name: sum(getattr(node, name) for node in nodes) for name in NodeStep.__struct_fields__})
