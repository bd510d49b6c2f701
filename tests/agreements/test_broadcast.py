"""Which bytes a worker gets: the whole weights first, and when in doubt; else how they changed."""

from __future__ import annotations

import numpy as np
import pytest

from evener.agreements.compression import compressor_for
from evener.agreements.layout import Flat
from evener.agreements.settings import AgreementSettings, Compression, Sgd
from evener.agreements.threads import ThreadPool
from evener.agreements.weights import Broadcast, CommonWeights, Pull
from support.merge_cases import layout, sources

OF = layout(500)


class Reader:
    """A worker that takes what it is sent."""

    def __init__(self, compression: Compression) -> None:
        self._packing = compressor_for(OF, compression, ThreadPool(1))
        self.flat = Flat(OF)

    def take(self, contents: Pull) -> None:
        data = np.frombuffer(contents.image, np.uint8)
        if contents.kind == "weights":
            self.flat.memory[:] = data
        else:
            assert self._packing is not None
            self._packing.unpack_difference(data, self.flat)


def stage(compression: Compression = "int8", staleness: int | None = 0) -> tuple[CommonWeights, Broadcast]:
    agreement = AgreementSettings(batch=1, outer=Sgd(learning_rate=1.0), pull=compression, staleness=staleness)
    common = CommonWeights(sources(1, OF)[0], agreement.outer, ThreadPool(1))
    return common, Broadcast(agreement, common, ThreadPool(1))


def advance(common: CommonWeights, seed: int) -> None:
    common.update(sources(1, OF, seed=seed)[0])


def test_uncompressed_broadcast_shares_the_weights_without_a_copy() -> None:
    common, pulls = stage("none")
    for _ in range(3):
        contents = pulls.pull("a")
        assert (contents.kind, bytes(contents.image)) == ("weights", common.weights.memory.tobytes())
        advance(common, 1)


@pytest.mark.parametrize("compression", ["bf16", "int8"])
@pytest.mark.parametrize("staleness", [0, None])
def test_workers_and_server_hold_identical_copies_of_the_weights(
    compression: Compression, staleness: int | None
) -> None:
    common, pulls = stage(compression, staleness)
    readers = {name: Reader(compression) for name in "ab"}
    kinds = []
    for step in range(8):
        for name, reader in readers.items():
            if staleness == 0 or (step + ord(name)) % 3:
                contents = pulls.pull(name)
                reader.take(contents)
                kinds.append(contents.kind)
                expected = pulls._copies["" if staleness == 0 else name].flat
                assert reader.flat.memory.tobytes() == expected.memory.tobytes()
        advance(common, step)
    assert kinds.count("weights") == 2


def test_difference_is_encoded_once_per_round() -> None:
    common, pulls = stage()
    for name in "abc":
        pulls.pull(name)
    advance(common, 1)
    found = [pulls.pull(name) for name in "abc"]
    assert [one.kind for one in found] == ["difference"] * 3
    assert [one.base for one in found] == [0] * 3
    assert len({np.frombuffer(one.image, np.uint8).ctypes.data for one in found}) == 1


@pytest.mark.parametrize("staleness", [0, None])
def test_worker_that_missed_a_version_gets_full_weights(staleness: int | None) -> None:
    common, pulls = stage(staleness=staleness)
    pulls.pull("a")
    pulls.pull("b")
    advance(common, 1)
    pulls.pull("b")
    advance(common, 2)
    pulls.pull("b")
    a = pulls.pull("a")
    assert a.kind == ("weights" if staleness == 0 else "difference"), "each has a copy of its own, or all have one"
    assert pulls.pull("b").kind == "weights"
    advance(common, 3)
    pulls.forget("b")
    b = pulls.pull("b")
    assert b.kind == "weights"
    reader = Reader("int8")
    reader.take(b)
    assert max(np.abs(x - y).max() for x, y in zip(reader.flat.floats, common.weights.floats, strict=True)) < 0.1


def test_bytes_being_sent_do_not_change() -> None:
    common, pulls = stage()
    first = pulls.pull("a")
    as_sent = bytes(first.image)
    advance(common, 1)
    second = pulls.pull("a")
    also_sent = bytes(second.image)
    advance(common, 2)
    pulls.pull("a")
    assert (bytes(first.image), bytes(second.image)) == (as_sent, also_sent)
