"""The training batches over which a program added up the value that it gives to `run.sum`.

A rank without a sample of a batch computes stand-ins, which a program adds up like samples:

    inside the loop    batches since the last sum
    after the loop     batches of the pass that has ended
    kept batches       those with which models were called since the last sum
"""

from __future__ import annotations

MIXED = (
    "run.sum of a value that a node added up over several batches, and the node has samples of some of them only: take "
    "run.sum of every batch inside the loop, and add up what it returns; or leave short batches out, by drop_last=True "
    "of the loader, and give fixed --shares"
)


class SummedBatches:
    """Records of which batches this rank has samples."""

    def __init__(self) -> None:
        self._passes: dict[object, set[bool]] = {}
        self._with_stand_ins: set[object] = set()
        self._ended: set[bool] = set()
        self._ended_with_stand_ins = False
        self._loaded = _Window()
        self._used = _Window()

    def open(self, owner: object, has_samples: bool, has_stand_ins: bool) -> None:
        """Record that `owner` loaded a training batch.

        Args:
            owner: a loader.
            has_samples: whether this rank has samples of the batch.
            has_stand_ins: whether any rank has none.
        """
        self._passes.setdefault(owner, set()).add(has_samples)
        if has_stand_ins:
            self._with_stand_ins.add(owner)
        self._ended, self._ended_with_stand_ins = set(), False
        self._loaded.add(has_samples)

    def use(self, has_samples: bool) -> None:
        """Record that a model is called with a known training batch."""
        self._used.add(has_samples)

    def close(self, owner: object) -> None:
        """Record that a training pass of `owner` is over."""
        self._ended |= self._passes.pop(owner, set())
        self._ended_with_stand_ins |= owner in self._with_stand_ins
        self._with_stand_ins.discard(owner)
        self._loaded = _Window()

    @property
    def may_have_ended_with_stand_ins(self) -> bool:
        """Whether training passes are over in which a rank had no sample of a batch."""
        return self._ended_with_stand_ins

    def take(self, *, is_kept: bool, is_open: bool) -> set[bool]:
        """Return whether this rank has samples of the batches of a sum; both values if it has samples of some only.

        Args:
            is_kept: whether the program computes batches that it keeps.
            is_open: whether a training batch is under way.
        """
        if is_kept:
            return self._used.take()
        return self._loaded.take() if is_open else self._ended


class _Window:
    """Batches since the last sum; several sums in a row are of the same batches."""

    def __init__(self) -> None:
        self._values: set[bool] = set()
        self._is_taken = False

    def add(self, has_samples: bool) -> None:
        """Add a batch."""
        self._values = {has_samples} if self._is_taken else self._values | {has_samples}
        self._is_taken = False

    def take(self) -> set[bool]:
        """Return the batches of a sum."""
        self._is_taken = True
        return self._values
