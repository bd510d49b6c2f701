"""What a peer says moves no terminal and forges no line, wherever it is decoded, and plain text stays as it was."""

from __future__ import annotations

import json
import re
import tracemalloc
from typing import Any

import msgspec
import pytest

from evener.membership.generation import Hello
from evener.membership.shared_values import decode_from_rank
from evener.ps.protocol.status import ClusterStatus, NodeStatus, decode_status, encode_status
from evener.records.events import Phase, RunEvent, decode_events, encode_events
from evener.records.record import Event, TrainRecord, Validation
from evener.records.schema import PRINTABLE
from evener.wire.errors import BadFrame
from evener.wire.frame import Close, encode_head
from evener.wire.limits import Limits
from evener.wire.reader import FrameReader
from support.fake_runs import fake_plan

EVIL = [
    "\x1b[2J\x1b]0;owned\x07",
    "all is well\nevener: training complete",
    "a\rb",
    "\x9b31mred",
    "txt\u202eexe.",
    "\u2028evener: forged",
    "a\x00b\x7f",
    "🙂 fine\x08\x08",
]


def texts(value: Any) -> list[str]:
    """All texts in what was decoded."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for one in pair for text in texts(one)]
    if isinstance(value, list | tuple):
        return [text for one in value for text in texts(one)]
    return []


def is_printable(value: Any) -> bool:
    found = texts(msgspec.to_builtins(value))
    return bool(found) and all(re.search(PRINTABLE, text) for text in found)


def poisoned(value: Any, text: str) -> Any:
    """The same with `text` for every text, but for those of which only some are allowed."""
    if isinstance(value, dict):
        return {key: one if key in ("strategy", "kind") else poisoned(one, text) for key, one in value.items()}
    if isinstance(value, list):
        return [poisoned(one, text) for one in value]
    return text if isinstance(value, str) else value


RECORD = TrainRecord(
    task="t",
    plan=fake_plan(),
    seed=1,
    epochs=1,
    precision="fp32",
    seconds=1.0,
    samples_per_second=1.0,
    final_loss=None,
    validation_accuracy=None,
    startup_seconds=0.0,
    events=(Event(step=1, kind="left out", message="m", nodes=("n",)),),
    environment={"python": "3"},
    ending="e",
    usual="u",
)
EVENTS = [
    Event(step=1, kind="left out", message="m", nodes=("n",)),
    Phase(what="training", detail="d"),
    RECORD,
]


@pytest.mark.parametrize("text", EVIL)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_text_of_a_decoded_event_is_printable(event: Any, text: str) -> None:
    value = msgspec.to_builtins(event)
    if isinstance(event, TrainRecord):  # names of nodes and devices in a plan are refused, not replaced
        value = {key: one if key == "plan" else poisoned(one, text) for key, one in value.items()}
    else:
        value = poisoned(value, text)
    (found,) = decode_events(msgspec.json.encode([(type(event).__name__, value)]))
    assert is_printable(found)


@pytest.mark.parametrize("text", EVIL)
def test_name_of_a_metric_is_printable(text: str) -> None:
    event = Validation(step=1, epoch=0, loss=1.0, accuracy=None, seconds=0.1, metrics={text: 0.25})
    (found,) = decode_events(encode_events([event]))
    assert is_printable(found)


@pytest.mark.parametrize("text", EVIL)
def test_escaped_json_is_cleaned_like_unescaped_json(text: str) -> None:
    plain = encode_events([Event(step=1, kind="left out", message=text, nodes=(text,))])
    escaped = json.dumps(json.loads(plain)).encode()
    for data in (plain, escaped):
        (event,) = decode_events(data)
        assert is_printable(event)


def test_plain_text_and_numbers_stay_unchanged() -> None:
    events: list[RunEvent] = [
        Event(step=1, kind="joined", message="node é 漢字 🙂 joined", nodes=("a",)),
        Validation(step=1, epoch=0, loss=1e-300, accuracy=None, seconds=0.1, metrics={"mAP50": 0.25}),
        Phase(what="training", detail='"quoted"  twice', num_samples=2**53),
    ]
    assert decode_events(encode_events(events)) == events


def test_unknown_event_kind_is_rejected() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_events(b'[["\\u001b[2J", {}]]')


@pytest.mark.parametrize("text", EVIL)
def test_decoded_cluster_status_is_printable(text: str) -> None:
    node = NodeStatus(
        name=text, address=text, device=text, score=None, state="present", reason=text, seconds=None, doing=text,
        samples=0, samples_per_second=0.0, bytes_sent=0, bytes_received=0,
    )  # fmt: skip
    assert is_printable(decode_status(encode_status(ClusterStatus(address="a", nodes=(node,)))))


@pytest.mark.parametrize("text", EVIL)
def test_unprintable_rank_name_is_rejected(text: str) -> None:
    for hello in (Hello(node=text), Hello(node="a", initial_nodes=(text,))):
        with pytest.raises(msgspec.DecodeError):
            decode_from_rank(msgspec.msgpack.encode(hello))


@pytest.mark.parametrize("text", EVIL)
def test_reason_of_a_closing_peer_is_printable(text: str) -> None:
    reader: FrameReader[Any] = FrameReader(Event, Limits())
    head = encode_head(0, msgspec.msgpack.encode(text), flags=1)
    reader.space[: len(head)] = head
    closed = reader.feed(len(head))
    assert isinstance(closed, Close)
    assert re.search(PRINTABLE, closed.reason)


@pytest.mark.parametrize("text", EVIL)
def test_message_of_a_bad_frame_is_printable(text: str) -> None:
    assert re.search(PRINTABLE, str(BadFrame(f"no field {text}")))


def test_hostile_event_data_are_rejected_with_bounded_memory() -> None:
    hostile = b'[["TrainRecord",{"task":"\\u0007","steps":1,"x":[' + b"[]," * 300_000 + b"[]]}]]"
    tracemalloc.start()
    try:
        with pytest.raises(msgspec.DecodeError):
            decode_events(hostile)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * len(hostile)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a\\nb", "a\\nb"), ("a\\\nb", "a\\ b"), ('"\\"', '"\\"'), ("é\x7f", "é?"), ("\\u0041\x1b", "\\u0041?")],
)
def test_only_invisible_characters_are_replaced(text: str, expected: str) -> None:
    assert decode_events(encode_events([Phase(what=text)])) == [Phase(what=expected)]


def test_events_with_nul_or_invalid_utf8_are_rejected() -> None:
    for data in (b'[["Phase",{"what":"a\x00"}]]', b'[["Phase",{"what":"\xff"}]]'):
        with pytest.raises(msgspec.DecodeError):
            decode_events(data)
