"""The four nouns as JSON files: what is written is read back, what is broken is refused with one clear sentence."""

from __future__ import annotations

import copy
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.records.errors import InvalidFile, InvalidValue, MissingFile
from evener.records.graph import Layer, ModelGraph
from evener.records.plan import Assignment, Plan, Prediction, Rejected
from evener.records.profile import (
    BatchTiming,
    ClusterProfile,
    DeviceProfile,
    LinkProfile,
    TaskTiming,
    Throughput,
)
from evener.records.record import Event, NodeStep, NodeSummary, Step, TrainRecord, Validation
from evener.records.schema import Noun, parse_noun, read_noun, write_noun
from support.refusals import refused

GRAPH = ModelGraph(
    name="net",
    layers=(
        Layer(
            name="conv",
            kind="Conv2d",
            output_shape=(8, 16, 16),
            parameters=224,
            forward_flops=110592.0,
            activation_bytes=3072,
            splits=("sample", "row"),
        ),
        Layer(name="head", kind="Linear", output_shape=(10,), parameters=20490, inputs=("conv",)),
    ),
    buffer_bytes=64,
)

PROFILE = ClusterProfile(
    devices=(
        DeviceProfile(
            node="ada",
            device="cuda:0",
            model="a GPU",
            cores=84,
            memory_bytes=24 << 30,
            usable_memory_bytes=22 << 30,
            bandwidth=9.1e11,
            throughputs=(
                Throughput(precision="fp32", matmul_flops=3.1e13, conv_flops=2.2e13),
                Throughput(precision="bf16", reason="no units for it"),
            ),
            timings=(
                TaskTiming(
                    task="digits",
                    precision="fp32",
                    batches=(
                        BatchTiming(samples=1, forward_seconds=1e-4, backward_seconds=2e-4),
                        BatchTiming(samples=2, forward_seconds=1.5e-4, backward_seconds=3e-4),
                    ),
                    max_samples=512,
                ),
            ),
        ),
        DeviceProfile(
            node="bob", device="cpu", model="a CPU", cores=4, memory_bytes=100, usable_memory_bytes=50, speed=0.25
        ),
    ),
    links=(LinkProfile(source=0, target=1, alpha=1.2e-4, beta=8.5e-9),),
    environment={"python": "3.11"},
)

PLAN = Plan(
    strategy="data",
    batch_size=64,
    accumulate=2,
    assignments=(
        Assignment(rank=0, node="ada", device="cuda:0", samples=30, sample_seconds=1e-3, reason="fast"),
        Assignment(rank=1, node="bob", device="cpu", samples=2, max_samples=4),
    ),
    prediction=Prediction(step_seconds=0.05, compute_seconds=0.04, communication_seconds=0.01, sent_bytes=1024),
    rejected=(Rejected(what="equal shares", reason="waits for bob", step_seconds=0.5),),
)

RECORD = TrainRecord(
    task="digits",
    plan=PLAN,
    seed=7,
    epochs=1,
    precision="fp32",
    seconds=12.5,
    samples_per_second=1000.1,
    final_loss=0.25,
    validation_accuracy=None,
    startup_seconds=2.0,
    every=2,
    steps=(
        Step(
            step=2,
            epoch=0,
            samples=128,
            loss=2.3,
            seconds=0.1,
            nodes=(
                NodeStep(
                    samples=128,
                    io_seconds=0.01,
                    compute_seconds=0.05,
                    wait_seconds=0.02,
                    update_seconds=0.005,
                    sent_bytes=2048,
                ),
            ),
        ),
    ),
    validations=(Validation(step=2, epoch=0, loss=2.2, accuracy=0.5, seconds=0.3),),
    events=(Event(step=1, kind="rebalanced", message="bob gets 1 sample less"),),
    nodes=(
        NodeSummary(
            name="ada",
            device="cuda:0",
            share=1.0,
            seconds_computing=10.0,
            seconds_waiting=2.0,
            bytes_sent=2048,
            bytes_received=2048,
            peak_memory_bytes=1 << 30,
        ),
    ),
    environment={"torch": "2.11"},
)

NOUNS: list[Noun] = [GRAPH, PROFILE, PLAN, RECORD]


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: type(noun).__name__)
def test_document_survives_a_round_trip_through_a_file(noun: Noun, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "noun.json"
    write_noun(noun, path)
    assert read_noun(path, type(noun)) == noun


def test_file_is_indented_json_with_its_version(tmp_path: Path) -> None:
    write_noun(PLAN, tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    assert json.loads(text)["version"] == 1
    assert '\n "batch_size": 64,\n' in text


def broken(noun: Noun, change: Callable[[Any], None]) -> bytes:
    raw = json.loads(msgspec.json.encode(noun))
    change(raw)
    return json.dumps(raw).encode()


def put(*keys: str | int, value: Any) -> Callable[[Any], None]:
    def change(raw: Any) -> None:
        for key in keys[:-1]:
            raw = raw[key]
        raw[keys[-1]] = value

    return change


def drop(*keys: str | int) -> Callable[[Any], None]:
    def change(raw: Any) -> None:
        for key in keys[:-1]:
            raw = raw[key]
        del raw[keys[-1]]

    return change


SENTENCES: list[tuple[Noun, Callable[[Any], None], str]] = [
    # the file as a whole
    (PLAN, put("version", value=2), "field version is 2; this Evener reads a Plan of version 1"),
    (PLAN, put("version", value="1"), 'field version is "1"; this Evener reads a Plan of version 1'),
    (PLAN, drop("version"), "field version is null; this Evener reads a Plan of version 1"),
    # missing and unknown fields
    (RECORD, drop("seed"), "field seed is missing"),
    (RECORD, drop("plan", "assignments", 1, "node"), "field plan.assignments[1].node is missing"),
    (GRAPH, drop("layers", 1, "kind"), "field layers[1].kind is missing"),
    (
        GRAPH,
        put("flops", value=1),
        "field flops is not known; ModelGraph has version, name, layers, element_bytes, buffer_bytes",
    ),
    (
        PLAN,
        put("prediction", "seconds", value=1),
        "field prediction.seconds is not known; Prediction has step_seconds, compute_seconds, "
        "communication_seconds, sent_bytes, alone_seconds, waiting_seconds, bottleneck, spread",
    ),
    (
        PLAN,
        put("rejected", 0, "cause", value=1),
        "field rejected[0].cause is not known; Rejected has what, reason, step_seconds, is_node",
    ),
    # wrong types, with the value
    (
        PROFILE,
        put("devices", 0, "cores", value="many"),
        'field devices[0].cores must be an integer, got "many"',
    ),
    (
        PROFILE,
        put("devices", 1, "bandwidth", value="1 GB/s"),
        'field devices[1].bandwidth must be a number or null, got "1 GB/s"',
    ),
    (
        PROFILE,
        put("devices", 0, "timings", 0, "batches", 1, "samples", value=2.5),
        "field devices[0].timings[0].batches[1].samples must be an integer, got 2.5",
    ),
    (PROFILE, put("devices", value={"node": "ada"}), 'field devices must be a list, got {"node":"ada"}'),
    (PROFILE, put("links", 0, value=3), "field links[0] must be an object, got 3"),
    (
        PROFILE,
        put("environment", value={"python": 3}),
        'every value of environment must be a string, got {"python":3}',
    ),
    (RECORD, put("seconds", value=None), "field seconds must be a number, got null"),
    (RECORD, put("plan", value=[]), "field plan must be an object, got []"),
    (PLAN, put("batch_size", value=True), "field batch_size must be an integer, got true"),
    (
        GRAPH,
        put("layers", 0, "output_shape", 2, value="16"),
        'field layers[0].output_shape[2] must be an integer, got "16"',
    ),
    # one of several words
    (
        GRAPH,
        put("layers", 0, "splits", 1, value="depth"),
        'field layers[0].splits[1] must be one of "channel", "column", "filter", "row", "sample", got "depth"',
    ),
    (
        RECORD,
        put("plan", "strategy", value="magic"),
        'field plan.strategy must be one of "asynchronous server", "averaging", "channel", "data", "data+channel", '
        '"data+filter", "data+hybrid", "data+pipeline", "data+sharded", "data+spatial", "filter", "hybrid", '
        '"pipeline", "pipeline+channel", "pipeline+filter", "pipeline+hybrid", "serial", "server", "sharded", '
        '"spatial", got "magic"',
    ),
    (
        PROFILE,
        put("devices", 0, "throughputs", 1, "precision", value="fp8"),
        'field devices[0].throughputs[1].precision must be one of "bf16", "fp16", "fp32", "fp64", got "fp8"',
    ),
    # what the nouns check themselves
    (
        GRAPH,
        put("layers", 0, "parameters", value=-1),
        "field layers[0].parameters must be zero or more, got -1",
    ),
    (
        GRAPH,
        put("layers", 1, "name", value="conv"),
        "field layers must be layers of different names, got 'conv'",
    ),
    (
        GRAPH,
        put("layers", 0, "inputs", value=["head"]),
        "inputs of layer conv must be names of earlier layers, got 'head'",
    ),
    (GRAPH, put("element_bytes", value=3), "field element_bytes must be 1, 2, 4 or 8, got 3"),
    (GRAPH, put("layers", value=[]), "field layers must be at least one layer, got ()"),
    (PROFILE, put("devices", 0, "node", value=""), "field devices[0].node must be a non-empty name, got ''"),
    (PROFILE, put("devices", 1, "cores", value=0), "field devices[1].cores must be positive, got 0"),
    (
        PROFILE,
        put("devices", 1, "usable_memory_bytes", value=101),
        "field devices[1].usable_memory_bytes must be between 1 and memory_bytes (100), got 101",
    ),
    (PROFILE, put("devices", 1, "speed", value=0), "field devices[1].speed must be positive, got 0.0"),
    (
        PROFILE,
        put("devices", 0, "throughputs", 0, "conv_flops", value=0),
        "field devices[0].throughputs[0].conv_flops must be positive, or null where unsupported, got 0.0",
    ),
    (
        PROFILE,
        put("devices", 0, "timings", 0, "batches", 1, "samples", value=1),
        "field devices[0].timings[0].batches must be in order of increasing samples, got [1, 1]",
    ),
    (
        PROFILE,
        put("links", 0, "target", value=2),
        "links: target must be an index of a device, 0 to 1, got 2",
    ),
    (
        PROFILE,
        put("links", 0, "source", value=1),
        "field links[0].target must be another device than source, got 1",
    ),
    (PROFILE, put("links", 0, "alpha", value=-1), "field links[0].alpha must be zero seconds or more, got -1.0"),
    (
        PLAN,
        put("assignments", 1, "samples", value=3),
        "field assignments must be samples that sum to 32, got 33",
    ),
    (
        PLAN,
        put("assignments", 1, "samples", value=5),
        "field assignments[1].samples must be at most max_samples (4), got 5",
    ),
    (
        PLAN,
        put("assignments", 1, "rank", value=2),
        "field assignments must be ranks 0, 1, 2 ... in order, got [0, 2]",
    ),
    (PLAN, put("accumulate", value=65), "field accumulate must be 1 to 64, got 65"),
    (RECORD, put("every", value=0), "field every must be 1 or more, got 0"),
    (RECORD, put("plan", "batch_size", value=0), "field plan.batch_size must be positive, got 0"),
]


@pytest.mark.parametrize(("noun", "change", "sentence"), SENTENCES, ids=[sentence for _, _, sentence in SENTENCES])
def test_broken_file_is_rejected_with_field_value_and_rule(
    noun: Noun, change: Callable[[Any], None], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(broken(noun, change))
    with pytest.raises(InvalidFile) as caught:
        read_noun(path, type(noun))
    assert str(caught.value) == f"{path}: {sentence}"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "the message is not JSON: Input data was truncated"),
        (b'{"version": 1', "the message is not JSON: Input data was truncated"),
        (b"hello", r"the message is not JSON: JSON is malformed: invalid character \(byte 0\)"),
        (b"[1, 2]", r"the message must hold a JSON object, got \[1,2\]"),
        (b'"plan"', 'the message must hold a JSON object, got "plan"'),
    ],
)
def test_data_other_than_a_json_object_are_rejected(data: bytes, sentence: str) -> None:
    with pytest.raises(InvalidFile, match=f"^{sentence}$"):
        parse_noun(data, Plan)


def test_long_value_is_shortened_in_the_message() -> None:
    with refused(InvalidFile):
        parse_noun(broken(PLAN, put("batch_size", value="x" * 1000)), Plan)


def test_file_of_another_kind_is_rejected() -> None:
    with refused(InvalidFile):
        parse_noun(broken(GRAPH, lambda raw: None), Plan)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with refused(MissingFile):
        read_noun(tmp_path / "nowhere.json", Plan)


def test_document_is_validated_in_python_too() -> None:
    with refused(InvalidValue) as caught:
        Plan(strategy="data", batch_size=0, assignments=PLAN.assignments)
    assert caught.value.field == "batch_size"


def test_document_is_immutable() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        copy.copy(PLAN).batch_size = 1  # type: ignore[misc]


@pytest.mark.parametrize("function", ["os.fsync", "pathlib.Path.replace"])
def test_failed_write_leaves_only_the_old_file(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_noun(PLAN, path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(function, full)
    with pytest.raises(OSError, match="No space left on device"):
        write_noun(RECORD, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["plan.json"]


def test_write_replaces_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "noun.json"
    write_noun(RECORD, path)
    write_noun(GRAPH, path)
    assert read_noun(path, ModelGraph) == GRAPH
    assert os.listdir(tmp_path) == ["noun.json"]


def test_sums_of_a_graph_are_those_of_its_layers() -> None:
    assert GRAPH.parameters == 20714
    assert GRAPH.parameter_bytes == 82856
    assert GRAPH.forward_flops == 110592.0
    assert GRAPH.activation_bytes == 3072


def test_largest_micro_batch_is_rounded_up() -> None:
    plan = Plan(
        strategy="data",
        batch_size=10,
        accumulate=3,
        assignments=(Assignment(rank=0, node="ada", device="cpu", samples=4),),
    )
    assert plan.micro_batch_size == 4


def test_timing_is_found_by_task_and_precision() -> None:
    ada = PROFILE.devices[0]
    assert ada.timing("digits", "fp32") is ada.timings[0]
    assert ada.timing("digits", "bf16") is None
    assert ada.timing("words", "fp32") is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"version": 1, "task": ' + b"[" * 100_000,
        b'{"version": 1e999}',
        b'{"version": 1, "task": "\xff"}',
        b'"text"',
        b"null",
    ],
)
@pytest.mark.parametrize("kind", [ModelGraph, ClusterProfile, Plan, TrainRecord])
def test_any_file_content_is_read_or_rejected_in_one_sentence(content: bytes, kind: type[Noun]) -> None:
    with pytest.raises(InvalidFile) as caught:
        parse_noun(content, kind, source="a file")
    assert str(caught.value).startswith("a file")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [10**18, -(10**18), 10**400])
def test_number_out_of_range_is_rejected_with_its_field(value: int) -> None:
    raw = msgspec.to_builtins(RECORD)
    raw["epochs"] = "NUMBER"
    content = json.dumps(raw).replace('"NUMBER"', str(value)).encode()
    with refused(InvalidFile):
        parse_noun(content, TrainRecord)
