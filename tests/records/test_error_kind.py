"""Errors keep their class and their fields on the way to another process, and to a process of another version."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import msgspec
import pytest

from evener.records.error_kind import ErrorKind, kind_of, restated
from evener.records.errors import (
    CannotWrite,
    DeviceLost,
    DoesNotFit,
    EvenerError,
    FolderInUse,
    Interrupted,
    InvalidFile,
    InvalidInput,
    InvalidValue,
    LineCut,
    MissingExtra,
    MissingFile,
    NeedsRanks,
    NodeLost,
    NonFiniteLoss,
    NotExact,
    NotNeeded,
    NoUsableNode,
    OutOfStep,
    TaskCannot,
    TrainingFailed,
    UnknownOptimizer,
    exit_code_of,
)
from evener.wire.errors import CannotJoin, ConnectionLost, NoAnswer

ERRORS = [
    EvenerError("a"),
    InvalidInput("b"),
    InvalidValue("--batch-size", -1, "positive"),
    InvalidFile("c"),
    NotExact("d"),
    NeedsRanks("it has BatchNorm", "leave --agreement out"),
    UnknownOptimizer("LARS"),
    OutOfStep({"a": "run.mean", "b": "run.save"}, "call both everywhere"),
    MissingFile("e"),
    FolderInUse(Path("runs/a"), "process 7 on pc1"),
    MissingExtra("f"),
    TaskCannot("g"),
    TrainingFailed("g"),
    NonFiniteLoss("node-1", 3, float("inf")),
    NoUsableNode("h"),
    CannotWrite(Path("x"), OSError(28, "No space left on device")),
    NodeLost("i", ["node-1", "node-2"]),
    LineCut("i", ["node-1"]),
    DeviceLost("i", ["node-1"]),
    DoesNotFit("j"),
    NotNeeded("k"),
    Interrupted("l"),
    ConnectionLost("m", "the master closes"),
    NoAnswer("192.168.1.10, port 7117", "timed out"),
]


def carried(error: BaseException) -> EvenerError:
    """`error` in another process."""
    kind = kind_of(error)
    assert msgspec.json.decode(msgspec.json.encode(kind), type=ErrorKind) == kind
    return msgspec.msgpack.decode(msgspec.msgpack.encode(kind), type=ErrorKind).as_error(str(error))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_error_preserves_class_message_and_fields(error: EvenerError) -> None:
    found = carried(error)
    assert type(found) is type(error)
    assert (str(found), found.exit_code) == (str(error), error.exit_code)
    assert vars(found) == vars(error)


def test_error_list_covers_every_error_class() -> None:
    def below(kind: type[EvenerError]) -> set[type[EvenerError]]:
        return {kind}.union(*(below(lower) for lower in kind.__subclasses__()))

    untried = below(EvenerError) - {type(error) for error in ERRORS}
    assert {kind for kind in untried if kind.__module__ == "evener.records.errors"} == set()


def test_nan_loss_survives() -> None:
    found = carried(NonFiniteLoss("node-1", 3, float("nan")))
    assert isinstance(found, NonFiniteLoss)
    assert isnan(found.loss)


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("connection closed by peer")])
def test_foreign_error_becomes_evener_error(error: Exception) -> None:
    assert type(carried(error)) is EvenerError


def test_full_disk_becomes_cannot_write() -> None:
    assert type(carried(OSError(28, "No space left on device"))) is CannotWrite


def test_ctrl_c_becomes_interrupted() -> None:
    assert type(carried(KeyboardInterrupt())) is Interrupted
    assert exit_code_of(KeyboardInterrupt()) == Interrupted.exit_code


def test_unknown_class_becomes_its_nearest_known_base() -> None:
    kind = kind_of(NoAnswer("here"))
    later = ErrorKind(kinds=("ClassOfALaterVersion", *kind.kinds[1:]), fields=kind.fields)
    assert type(later.as_error("why")) is CannotJoin
    assert type(ErrorKind(kinds=("int", "__builtins__")).as_error("why")) is EvenerError


def test_invalid_fields_are_dropped_or_made_printable() -> None:
    encode = msgspec.msgpack.encode
    bad = {"nodes": encode(5), "exit_code": encode(0), "__class__": encode("x")}
    found = ErrorKind(kinds=("NodeLost",), fields=bad).as_error("why")
    assert isinstance(found, NodeLost)
    assert (found.nodes, found.exit_code) == ((), 4)
    shown = ErrorKind(kinds=("NodeLost",), fields={"nodes": encode(["a\x1b[2J"])}).as_error("why")
    assert isinstance(shown, NodeLost)
    assert shown.nodes == ("a?[2J",)
    broken = ErrorKind(kinds=("NodeLost",), fields={"nodes": b"\xc1"}).as_error("why")
    assert isinstance(broken, NodeLost)
    assert broken.nodes == ()


@pytest.mark.parametrize("value", [object(), 2**80, {1: {2}}, "x" * 10**6])
def test_unserialisable_value_does_not_block_the_error(value: object) -> None:
    found = carried(InvalidValue("field", value, "small"))
    assert isinstance(found, InvalidValue)
    assert (found.field, found.allowed) == ("field", "small")


def test_new_message_preserves_class_and_fields() -> None:
    found = restated(NodeLost("gone", ["a"]), "gone, the 3rd time")
    assert isinstance(found, NodeLost)
    assert (str(found), found.nodes) == ("gone, the 3rd time", ("a",))
