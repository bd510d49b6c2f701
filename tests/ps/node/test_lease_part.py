"""A node's part in a run: leases in order and once, answers that free the way, everything unanswered said again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from evener.agreements import settings
from evener.agreements.messages import Answer, Lease, SampleRange
from evener.agreements.settings import AgreementSettings, Sgd
from evener.ps.node.lease_part import LeasePart
from evener.ps.node.node_part import NodeConfig
from evener.ps.protocol.blob import Blob
from evener.ps.protocol.config import Versions
from evener.ps.protocol.messages import (
    BlobChunk,
    Contribution,
    FetchBlob,
    Header,
    Ready,
    ServerReply,
    Validate,
    Validated,
    ValidationSlice,
)
from evener.records.profile import DeviceProfile
from support.linear_engine import BATCH, RATE, Mood, build, job, weights

SYNC = settings.synchronous(batch=BATCH, outer=Sgd(learning_rate=RATE))
OVERLAPPED = replace(settings.average(batch=BATCH, local_steps=1), is_overlapped=True)


class Sent(list[tuple[Header, tuple[Any, ...]]]):
    """What a session sends."""

    def __call__(self, header: Header, *buffers: Any) -> None:
        self.append((header, tuple(map(bytes, buffers))))

    @property
    def numbers(self) -> list[int]:
        return [header.push.number for header, _ in self if isinstance(header, Contribution)]

    @property
    def images(self) -> list[bytes]:
        return [buffers[0] for header, buffers in self if isinstance(header, Contribution)]


def config(mood: Mood, cache: Path = Path()) -> NodeConfig:
    profile = DeviceProfile(node="node", device="cpu", model="", cores=1, memory_bytes=1, usable_memory_bytes=1)
    return NodeConfig("node", "cpu", 1.0, None, cache, Versions("0", "3.11", ""), lambda: profile, build(mood))


def session(agreement: AgreementSettings = SYNC) -> tuple[LeasePart, Sent]:
    """One that is ready."""
    sent = Sent()
    one = LeasePart(job(agreement), config(Mood(seconds=0)), sent, lambda: None)
    one.start()
    assert one.is_prepared
    assert [header for header, _ in sent] == [Ready(run="linear-1", unit_seconds=1e-3)]
    return one, sent


def told(
    lease: int | None = None, *, answers: int | None = None, brings: bool = False, **words: Any
) -> tuple[ServerReply, list[memoryview]]:
    """What the server says, with the number of a lease, or with weights."""
    leased = None if lease is None else Lease(number=lease, version=0, samples=portion(lease))
    contents: Any = "weights" if brings else "nothing"
    answer = Answer(version=0, answers=answers, contents=contents, lease=leased, **words)
    return ServerReply(run="linear-1", answer=answer), [weights().memory.data] if brings else []


def portion(number: int) -> SampleRange:
    return SampleRange(epoch=0, ranges=((BATCH * (number % 5), BATCH),))


def test_repeated_lease_is_worked_on_once() -> None:
    own, sent = session()
    assert not own.can_work
    own.on_reply(*told(1, brings=True))
    own.on_reply(*told(1))
    assert own.can_work
    own.work()
    assert sent.numbers == [1]
    own.on_reply(*told(1))
    assert not own.can_work


def test_answer_is_awaited_before_the_next_lease_without_overlap() -> None:
    own, _ = session()
    own.on_reply(*told(1, brings=True))
    own.work()
    own.on_reply(*told(2))
    assert not own.can_work
    own.on_reply(*told(answers=1, verdict="applied", brings=True))
    assert own.can_work


def test_two_contributions_are_in_flight_in_order_with_overlap() -> None:
    own, sent = session(OVERLAPPED)
    own.on_reply(*told(1, brings=True))
    own.on_reply(*told(2))
    own.on_reply(*told(3))
    for _ in range(2):
        assert own.can_work
        own.work()
    assert sent.numbers == [1, 2]
    assert not own.can_work


def test_unanswered_contribution_is_resent_with_the_same_bytes() -> None:
    own, sent = session(OVERLAPPED)
    own.on_reply(*told(1, brings=True))
    own.on_reply(*told(2))
    for _ in range(2):
        own.work()
    own.on_reply(*told(answers=1, verdict="applied"))
    own.resend()
    assert sent.numbers == [1, 2, 2]
    assert sent.images[2] == sent.images[1]


def test_leases_are_dropped_when_the_server_resets_them() -> None:
    own, sent = session()
    own.on_reply(*told(1, brings=True))
    own.on_reply(*told(7, resets_leases=True))
    own.work()
    assert sent.numbers == [7]
    own.on_reply(*told(answers=7, verdict="applied"))
    assert not own.can_work


def test_excluded_node_drops_its_leases() -> None:
    own, _ = session()
    own.on_reply(*told(1, brings=True))
    own.drop_leases()
    assert not own.can_work


@pytest.mark.parametrize(("first", "size"), [(0, 21), (5, 3)])
def test_validation_slice_uses_the_weights_sent_with_it(first: int, size: int) -> None:
    own, sent = session()
    slices = (ValidationSlice(4, first, size), ValidationSlice(6, 0, 21))
    own.validate(Validate(run="linear-1", slices=slices), [weights().memory.data])
    for part, (found, _) in zip(slices, list(sent)[-2:], strict=True):
        assert isinstance(found, Validated)
        assert (found.run, found.number) == ("linear-1", part.number)
        assert found.loss is not None
        assert found.loss > 0
        assert 0 <= found.correct <= part.size


def test_code_is_fetched_before_the_engine_and_after_a_reconnect(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "task.py").write_text("task = 1\n")
    code, mood, sent = Blob(tmp_path / "code", ["task.py"]), Mood(), Sent()
    own = LeasePart(replace(job(SYNC), code=code.digest), config(mood, tmp_path), sent, lambda: None)
    own.start()
    own.on_reply(*told(1, brings=True))
    assert (own.is_prepared, own.can_work, mood.made) == (False, False, 0)
    first = [header for header, _ in sent]
    assert all(isinstance(header, FetchBlob) for header in first)
    own.resend()
    assert [header for header, _ in sent] == 2 * first
    chunk = BlobChunk(digest=code.digest, offset=0, total=code.num_bytes)
    own.on_chunk(chunk, memoryview(code.read(0, code.num_bytes)))
    assert (own.is_prepared, mood.code) == (True, tmp_path / "blobs" / code.digest)
    own.close()


def test_session_can_be_closed_before_its_engine_exists(tmp_path: Path) -> None:
    own = LeasePart(replace(job(SYNC), code=64 * "0"), config(Mood(), tmp_path), Sent(), lambda: None)
    own.start()
    own.close()
    assert not own.is_prepared
    assert not list((tmp_path / "blobs").iterdir())
