"""Errors keep their class and their fields on the way to another process, and to a process of another version."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import msgspec
import pytest

from evener.records.error_kind import ErrorKind, kind_of, restated
from evener.records.errors import (
    CannotWrite,
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
def test_an_error_keeps_class_sentence_and_fields(error: EvenerError) -> None:
    found = carried(error)
    assert type(found) is type(error)
    assert (str(found), found.exit_code) == (str(error), error.exit_code)
    assert vars(found) == vars(error)


def test_every_class_of_errors_is_tried_here() -> None:
    def below(kind: type[EvenerError]) -> set[type[EvenerError]]:
        return {kind}.union(*(below(lower) for lower in kind.__subclasses__()))

    untried = below(EvenerError) - {type(error) for error in ERRORS}
    assert {kind for kind in untried if kind.__module__ == "evener.records.errors"} == set()


def test_a_loss_that_is_no_number_stays_one() -> None:
    found = carried(NonFiniteLoss("node-1", 3, float("nan")))
    assert isinstance(found, NonFiniteLoss)
    assert isnan(found.loss)


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("connection closed by peer")])
def test_an_error_of_others_is_no_class_of_ours(error: Exception) -> None:
    assert type(carried(error)) is EvenerError


def test_a_full_disk_is_what_cannot_be_written() -> None:
    assert type(carried(OSError(28, "No space left on device"))) is CannotWrite


def test_ctrl_c_is_an_interruption() -> None:
    assert type(carried(KeyboardInterrupt())) is Interrupted
    assert exit_code_of(KeyboardInterrupt()) == Interrupted.exit_code


def test_a_class_that_is_not_known_here_is_the_nearest_one_that_is() -> None:
    kind = kind_of(NoAnswer("here"))
    later = ErrorKind(kinds=("ClassOfALaterVersion", *kind.kinds[1:]), fields=kind.fields)
    assert type(later.as_error("why")) is CannotJoin
    assert type(ErrorKind(kinds=("int", "__builtins__")).as_error("why")) is EvenerError


def test_what_a_stranger_puts_into_the_fields_is_left_out_or_made_printable() -> None:
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
def test_a_value_that_cannot_travel_does_not_keep_the_error_from_it(value: object) -> None:
    found = carried(InvalidValue("field", value, "small"))
    assert isinstance(found, InvalidValue)
    assert (found.field, found.allowed) == ("field", "small")


def test_another_sentence_leaves_class_and_fields() -> None:
    found = restated(NodeLost("gone", ["a"]), "gone, the 3rd time")
    assert isinstance(found, NodeLost)
    assert (str(found), found.nodes) == ("gone, the 3rd time", ("a",))
