"""Bytes become the frames that were sent, however they are cut up; anything else becomes a refusal."""

import tracemalloc
import weakref
import zlib
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.records.errors import InvalidValue
from evener.wire.errors import BadFrame
from evener.wire.frame import Close, Frame, encode_close, encode_frame, encode_head
from evener.wire.limits import Limits
from evener.wire.reader import READ_AHEAD, FrameReader
from support.refusals import refused
from support.wire_peers import Hello, Kinds, Push

headers = st.builds(Hello, st.text(max_size=5)) | st.builds(Push, st.integers(-(2**63), 2**63 - 1))
frames = st.lists(st.tuples(headers, st.lists(st.binary(max_size=5000), max_size=4)), max_size=4)
TIGHT = Limits(header_bytes=64, buffers=3, frame_bytes=100)
PUSH = msgspec.msgpack.encode(Push(1))


def stream(sent: Sequence[tuple[Kinds, Sequence[bytes]]]) -> bytes:
    """The bytes of these frames."""
    return b"".join(bytes(v) for i, (h, b) in enumerate(sent) for v in encode_frame(i, h, b, Limits()))


def feed(reader: FrameReader[Kinds], data: bytes) -> list[Frame[Kinds] | Close]:
    """What comes out when `data` comes in."""
    found, count = [], 0
    while True:
        arrived = reader.feed(count)
        while arrived is not None:
            found.append(arrived)
            arrived = reader.feed(0)
        if not data:
            return found
        count = min(len(reader.space), len(data))
        reader.space[:count] = data[:count]
        data = data[count:]


def contents(found: Sequence[Frame[Kinds] | Close]) -> list[tuple[Kinds, list[bytes]]]:
    return [(f.header, [bytes(b) for b in f.buffers]) for f in found if isinstance(f, Frame)]


@settings(deadline=None)
@given(frames, st.data())
def test_any_split_of_the_stream_gives_the_same_frames(
    sent: list[tuple[Kinds, list[bytes]]], data: st.DataObject
) -> None:
    whole = stream(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    reader: FrameReader[Kinds] = FrameReader(Kinds, Limits())
    found = []
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += feed(reader, whole[begin:end])
    assert contents(found) == sent
    assert not reader.midway


def test_one_byte_at_a_time_gives_the_same_frames() -> None:
    sent: list[tuple[Kinds, list[bytes]]] = [(Push(1), [b"abc", b"", b"d"]), (Hello("x"), []), (Push(2), [b"", b""])]
    reader: FrameReader[Kinds] = FrameReader(Kinds, Limits())
    found = [frame for byte in stream(sent) for frame in feed(reader, bytes([byte]))]
    assert contents(found) == sent


@settings(deadline=None)
@given(headers, st.lists(st.binary(max_size=300), max_size=3), st.data())
def test_no_prefix_of_a_frame_yields_it(header: Kinds, buffers: list[bytes], data: st.DataObject) -> None:
    whole = stream([(header, buffers)])
    reader: FrameReader[Kinds] = FrameReader(Kinds, Limits())
    assert feed(reader, whole[: data.draw(st.integers(0, len(whole) - 1))]) == []


@settings(deadline=None)
@given(st.binary(max_size=400), st.integers(1, 50))
def test_random_bytes_are_rejected(data: bytes, piece: int) -> None:
    reader: FrameReader[Kinds] = FrameReader(Kinds, TIGHT)
    refused = False
    for begin in range(0, len(data), piece):
        try:
            assert feed(reader, data[begin : begin + piece]) == []
        except BadFrame:
            refused = True
            break
    assert refused or len(data) < 20 or data.startswith(b"EVNR")


@settings(deadline=None)
@given(st.data())
def test_damaged_head_is_rejected(data: st.DataObject) -> None:
    whole = bytearray(stream([(Push(7), [b"abc", b"de"])]))
    place = data.draw(st.integers(0, len(whole) - 6))  # the payload has no checksum of its own
    whole[place] ^= data.draw(st.integers(1, 255))
    reader: FrameReader[Kinds] = FrameReader(Kinds, Limits())
    with pytest.raises(BadFrame):
        assert feed(reader, bytes(whole) + bytes(200_000)) == []


@settings(deadline=None)
@given(st.permutations(range(4)), st.integers(0, 4))
def test_reordered_repeated_or_missing_frames_are_rejected(order: list[int], length: int) -> None:
    parts = [b"".join(encode_frame(i, Push(i), [b"abc"], Limits())) for i in range(4)]
    chosen = order[:length]
    reader: FrameReader[Kinds] = FrameReader(Kinds, Limits())
    if chosen == list(range(length)):
        assert len(feed(reader, b"".join(parts[i] for i in chosen))) == length
    else:
        with pytest.raises(BadFrame, match=r"expected frame \d, got \d: a frame was lost, repeated or reordered"):
            feed(reader, b"".join(parts[i] for i in chosen))


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n", r"a frame begins with b'EVNR', version 1 and flags 0 or 1, got \(b'GET '"),
        (b"EVNR\x02" + bytes(40), r"got \(b'EVNR', 2, 0\)"),
        (b"EVNR\x01\x02" + bytes(40), r"got \(b'EVNR', 1, 2\)"),
        (encode_head(0, bytes(65)), "a header must be at most 64 bytes, got 65"),
        (encode_head(0, PUSH, [1] * 4), "a frame must have at most 3 buffers, got 4"),
        (encode_head(0, PUSH, [50, 51]), "a frame must have at most 100 bytes of payload, got 101"),
        (encode_head(0, PUSH, [2**64 - 1] * 3), "a frame must have at most 100 bytes of payload"),
        (encode_head(0, b""), "unknown or invalid header: Input data was truncated"),
        (encode_head(0, b"\xc1"), "unknown or invalid header"),
        (encode_head(0, msgspec.msgpack.encode({"type": "Other"})), "Invalid value 'Other'"),
        (encode_head(0, msgspec.msgpack.encode({"type": "Push", "round": "x"})), r"Expected `int`, got `str`"),
        (encode_head(0, b"\x82\xa4type\xa5Hello\xa4name\xa2\xff\xfe"), "unknown or invalid header"),
        (encode_head(0, PUSH + b"\0"), "unknown or invalid header"),
        (encode_head(1, PUSH), "expected frame 0, got 1"),
        (encode_head(0, PUSH, flags=1), "unknown or invalid header: Expected `str`"),
    ],
)
def test_every_rejection_has_its_sentence_and_is_final(data: bytes, rule: str) -> None:
    reader: FrameReader[Kinds] = FrameReader(Kinds, TIGHT)
    with pytest.raises(BadFrame, match=rule):
        feed(reader, data)
    with pytest.raises(BadFrame, match=rule):
        feed(reader, stream([(Push(1), [])]))


def test_rejecting_reader_is_freed_without_the_garbage_collector(no_collection: None) -> None:
    reader: FrameReader[Kinds] = FrameReader(Kinds, Limits())
    alive = weakref.ref(reader)
    with pytest.raises(BadFrame):
        feed(reader, bytes(100))
    del reader
    assert alive() is None, "it would stay, with its memory, until the collector comes by"


def test_wrong_checksum_is_reported() -> None:
    head = encode_head(0, PUSH)
    reader: FrameReader[Kinds] = FrameReader(Kinds, Limits())
    with refused(BadFrame):
        feed(reader, head[:-4] + (zlib.crc32(head[:-4]) ^ 1).to_bytes(4, "little"))


def test_endless_nesting_is_rejected_without_a_stack_overflow() -> None:
    deep = b"\x83\xa4type\xa4Push\xa5round\x01\xa5other" + b"\x91" * 60_000 + b"\x01"
    reader: FrameReader[Kinds] = FrameReader(Kinds, Limits())
    with refused(BadFrame):
        feed(reader, encode_head(0, deep))


def test_payload_arrives_in_the_memory_chosen_by_place() -> None:
    asked = []
    memory = [bytearray(3), bytearray(2)]

    def place(header: Kinds, lengths: tuple[int, ...]) -> list[bytearray]:
        asked.append((header, lengths))
        return memory

    reader: FrameReader[Kinds] = FrameReader(Kinds, Limits(), place)
    (frame,) = feed(reader, stream([(Push(4), [b"abc", b"de"])]))
    assert asked == [(Push(4), (3, 2))]
    assert memory == [b"abc", b"de"]
    assert isinstance(frame, Frame)
    assert frame.buffers[1].obj is memory[1]


def test_large_payload_is_received_in_place() -> None:
    memory = bytearray(50_000)
    reader: FrameReader[Kinds] = FrameReader(Kinds, Limits(), lambda header, lengths: [memory])
    whole = stream([(Push(4), [bytes(50_000)])])
    assert feed(reader, whole[:4096]) == []
    assert reader.space.obj is memory
    assert len(reader.space) == len(whole) - 4096


def test_place_may_drop_a_payload_and_the_next_frame_follows() -> None:
    reader: FrameReader[Kinds] = FrameReader(Kinds, Limits(), lambda header, lengths: None)
    sent: list[tuple[Kinds, list[bytes]]] = [(Push(1), [bytes(300_000), b"x"]), (Hello("a"), [])]
    tracemalloc.start()
    found = feed(reader, stream(sent))
    tracemalloc.stop()
    assert contents(found) == [(Push(1), []), (Hello("a"), [])]


def test_dropped_large_payload_takes_no_memory() -> None:
    reader: FrameReader[Kinds] = FrameReader(Kinds, Limits(), lambda header, lengths: None)
    head = encode_frame(0, Push(1), [bytes(1)], Limits())[0]
    announced = encode_head(0, PUSH, [2**33])
    assert len(head) == len(announced)
    tracemalloc.start()
    assert feed(reader, announced) == []
    assert tracemalloc.get_traced_memory()[1] < 200_000
    tracemalloc.stop()
    assert len(reader.space) <= 64 * 1024


def test_place_may_reject_a_frame() -> None:
    def place(header: Kinds, lengths: tuple[int, ...]) -> None:
        raise BadFrame(f"the update has {sum(lengths)} bytes, the model 8")

    reader: FrameReader[Kinds] = FrameReader(Kinds, Limits(), place)
    for _ in range(2):
        with refused(BadFrame):
            feed(reader, stream([(Push(4), [b"abc"])]))


@pytest.mark.parametrize("places", [[], [bytearray(2)], [bytearray(3), bytearray(1)]])
def test_place_with_the_wrong_memory_raises_invalid_value(places: list[bytearray]) -> None:
    reader: FrameReader[Kinds] = FrameReader(Kinds, Limits(), lambda header, lengths: places)
    with refused(InvalidValue):
        feed(reader, stream([(Push(4), [b"abc"])]))


def test_progress_is_reported_per_read_ahead_and_at_the_end() -> None:
    told = []

    def on_part(header: Kinds, received: int, is_whole: bool) -> bool:
        told.append((header, received))
        return is_whole

    reader: FrameReader[Kinds] = FrameReader(Kinds, Limits(), on_part=on_part)
    whole = stream([(Push(4), [bytes(5000), bytes(9000)]), (Push(5), [bytes(300)])])
    for begin in range(0, len(whole), 1000):
        feed(reader, whole[begin : begin + 1000])
    *before, last, small = told
    assert (last, small) == ((Push(4), 14_000), (Push(5), 300))
    counts = [0, *(count for _, count in before)]
    assert all(READ_AHEAD <= b - a < READ_AHEAD + 1000 for a, b in pairwise(counts))
    assert 14_000 - counts[-1] < READ_AHEAD + 1000


def test_goodbye_is_returned_with_its_reason() -> None:
    reader: FrameReader[Kinds] = FrameReader(Kinds, Limits())
    data = stream([(Push(1), [b"abc"])]) + bytes(encode_close(1, "tired")[0])
    assert feed(reader, data)[-1] == Close("tired")


def test_head_larger_than_the_read_ahead_is_read() -> None:
    sent: list[tuple[Kinds, list[bytes]]] = [(Hello("x" * 9000), [b"ab"] * 3000), (Push(1), [b"c"])]
    reader: FrameReader[Kinds] = FrameReader(Kinds, Limits())
    assert contents(feed(reader, stream(sent))) == sent
