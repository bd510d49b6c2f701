"""The bytes of a frame, literally."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.records.errors import InvalidValue
from evener.wire.frame import CLOSE, allocate, as_bytes, drop_sent, encode_close, encode_frame, encode_head
from evener.wire.limits import Limits
from support.refusals import refused
from support.wire_peers import Hello, Push


def test_head_has_the_documented_bytes() -> None:
    head = encode_head(sequence=258, header=b"abc", lengths=[5, 0x0102030405])
    assert head == (
        b"EVNR" b"\x01" b"\x00" b"\x02\x00" b"\x03\x00\x00\x00" b"\x02\x01\x00\x00\x00\x00\x00\x00"
        b"\x05\x00\x00\x00\x00\x00\x00\x00" b"\x05\x04\x03\x02\x01\x00\x00\x00" b"abc" b"\x38\x06\xc6\xb6"
    )  # fmt: skip


def test_frame_is_a_head_and_uncopied_payload() -> None:
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    frame = encode_frame(7, Hello("a"), [weights, b"xy"], Limits())
    header = msgspec.msgpack.encode(Hello("a"))
    assert bytes(frame[0]) == encode_head(7, header, [24, 2])
    weights[0, 0] = 99
    assert bytes(frame[1]) == weights.tobytes()
    assert len(frame) == 3


def test_goodbye_is_a_head_with_a_bounded_reason() -> None:
    assert bytes(encode_close(3, "tired")[0]) == encode_head(3, msgspec.msgpack.encode("tired"), flags=CLOSE)
    assert sum(map(len, encode_close(3, "x" * 10**6))) < 2000


def test_head_of_a_small_gradient_takes_less_than_a_thousandth() -> None:
    frame = encode_frame(5000, Push(5000), [np.zeros(25_450, np.float32)], Limits())
    assert len(frame[0]) / len(frame[1]) < 0.001


@pytest.mark.parametrize(
    ("buffer", "expected"),
    [
        (b"abc", b"abc"),
        (bytearray(b"abc"), b"abc"),
        (memoryview(b"abcd")[::1], b"abcd"),
        (np.array([1, 2], "<u2"), b"\x01\x00\x02\x00"),
        (np.array([[1], [2]], np.int8), b"\x01\x02"),
        (np.array(1.0, np.float64), b"\x00\x00\x00\x00\x00\x00\xf0\x3f"),
        (np.zeros((0, 5)), b""),
        (np.zeros(2, np.float16), bytes(4)),
        (np.zeros(1, np.complex64), bytes(8)),
        (np.array([1], ">i4"), b"\x00\x00\x00\x01"),
    ],
)
def test_contiguous_memory_becomes_bytes(buffer: bytes | bytearray | memoryview, expected: bytes) -> None:
    view = as_bytes(buffer)
    assert bytes(view) == expected
    assert (view.format, view.ndim) == ("B", 1)


@pytest.mark.parametrize("buffer", [np.zeros((4, 4))[:, 1], np.zeros((2, 3)).T, memoryview(b"abcd")[::2]])
def test_memory_with_gaps_is_rejected(buffer: memoryview) -> None:
    with refused(InvalidValue):
        as_bytes(buffer)


def test_frame_beyond_the_limits_is_not_encoded() -> None:
    limits = Limits(header_bytes=20, buffers=2, frame_bytes=10)
    encode_frame(0, Hello("a"), [b"12345", b"67890"], limits)
    with refused(InvalidValue):
        encode_frame(0, Hello("a" * 20), [], limits)
    with refused(InvalidValue):
        encode_frame(0, Hello("a"), [b"", b"", b""], limits)
    with refused(InvalidValue):
        encode_frame(0, Hello("a"), [b"12345", b"678901"], limits)


@settings(deadline=None)
@given(st.lists(st.sampled_from([b"", b"a", b"bcd", b"efghijklm"]), max_size=5), st.data())
def test_partial_sends_preserve_bytes_and_order(buffers: list[bytes], data: st.DataObject) -> None:
    frame = encode_frame(0, Hello("a"), buffers, Limits())
    whole, sent = b"".join(frame), b""
    while frame:
        offered = b"".join(frame)
        count = data.draw(st.integers(1, len(offered)))
        sent += offered[:count]
        drop_sent(frame, count)
        assert sent + b"".join(frame) == whole
    assert sent == whole


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=5))
def test_memory_is_allocated_with_the_requested_lengths(lengths: list[int]) -> None:
    assert [view.nbytes for view in allocate(Hello("a"), lengths)] == lengths


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("header_bytes", 0), ("buffers", -1), ("buffers", 65536), ("frame_bytes", -1), ("frame_bytes", 2**63),
        ("connections", 0), ("pending", 0), ("queued_frames", 0), ("patience", 0.0), ("patience", float("inf")),
        ("handshake_seconds", float("nan")),
    ],
)  # fmt: skip
def test_impossible_limits_are_rejected(field: str, value: float) -> None:
    with pytest.raises(InvalidValue, match=f"{field} must be"):
        Limits(**{field: value})  # type: ignore[arg-type]
