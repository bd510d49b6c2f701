"""Local nodes: what the option means, and where the nodes run."""

from typing import Any

import pytest

from evener.launch.nodes import (
    NodeSpec,
    local_nodes,
    options_of,
    parse_local_nodes,
    parse_memory,
    place,
    relative_shares,
)
from evener.records.errors import InvalidValue
from support.refusals import refused


def test_three_speeds_give_three_single_threaded_nodes() -> None:
    nodes = parse_local_nodes("1.0,0.5,0.25")
    assert [node.name for node in nodes] == ["node-0", "node-1", "node-2"]
    assert all(len(node.cores) == 1 and node.threads == 1 for node in nodes)
    ratios = [node.speed_at(0) / nodes[0].speed_at(0) for node in nodes]
    assert ratios == pytest.approx([1.0, 0.5, 0.25])


def test_speed_changes_at_its_step() -> None:
    [node] = parse_local_nodes("1.0@40=0.33@60=0.5")
    assert [node.speed_at(step) for step in (0, 39, 40, 59, 60, 1000)] == [1.0, 1.0, 0.33, 0.33, 0.5, 0.5]


@pytest.mark.parametrize("text", ["", " ", "1.0,", "fast", "0", "-1", "1.5", "1.0@x=1", "1@5=0", "1@9=0.5@3=1", "nan"])
def test_invalid_speeds_are_rejected_in_one_sentence(text: str) -> None:
    with refused(InvalidValue):
        parse_local_nodes(text)


def test_memory_is_needed_for_every_node() -> None:
    assert [n.memory_bytes for n in parse_local_nodes("1,1", [5, 6])] == [5, 6]
    with refused(InvalidValue):
        parse_local_nodes("1,1,1", [5, 6])
    with refused(InvalidValue):
        local_nodes(["cpu"], [5, 6])


@pytest.mark.parametrize(
    ("speeds", "cores", "places", "shrink"),
    [
        ([1.0, 0.5, 0.25], 2, [0, 1, 1], 1.0),
        ([0.25, 0.5, 1.0], 2, [1, 1, 0], 1.0),
        ([1.0, 1.0, 1.0, 1.0], 2, [0, 1, 0, 1], 0.5),
        ([1.0, 0.5], 1, [0, 0], 1 / 1.5),
        ([0.5], 8, [0], 1.0),
    ],
)
def test_no_core_runs_more_than_one_full_node(
    speeds: list[float], cores: int, places: list[int], shrink: float
) -> None:
    found, factor = place(speeds, cores)
    assert found == places
    assert factor == pytest.approx(shrink)


def test_devices_become_nodes_of_full_speed() -> None:
    assert local_nodes(["cuda:0", "cpu"]) == [
        NodeSpec(name="node-0", device="cuda:0"),
        NodeSpec(name="node-1", device="cpu"),
    ]


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--shares", "0,0", "one is above zero"),
        ("--shares", "nan,1", "nan is out of range"),
        ("--shares", "1e308,1e308", "1e308 is out of range"),
        ("--shares", "-1,1", "-1 is out of range"),
        ("--shares", "1,", "an item is empty"),
        ("--shares", "1,two", "'two' is not a number"),
        ("--shares", "1,2,3", "3 numbers for 2 nodes"),
        ("--memory", "2XB", "the units are B, KB, MB, GB, TB"),
        ("--memory", "0GB", "from 1 byte"),
        ("--memory", "99999999999TB", "from 1 byte to 2^60 bytes"),
        ("--memory", "1e400", "a number and a unit"),
        ("--local-nodes", "1,", "an item is empty"),
        ("--local-nodes", "2", "a part of that of the fastest node"),
        ("--local-nodes", "1e-300", "from 0.001 to 1"),
        ("--local-nodes", "fast", "'fast' is not a number"),
    ],
)
def test_invalid_value_is_rejected_with_the_problem(option: str, value: str, problem: str) -> None:
    read = {"--shares": lambda text: relative_shares(text, 2), "--memory": parse_memory}.get(option, parse_local_nodes)
    with pytest.raises(InvalidValue) as refused:
        read(value)
    assert refused.value.field == option
    assert problem in str(refused.value)


def test_memory_may_be_in_terabytes() -> None:
    assert parse_memory("2TB,1TiB,512mb") == [2 * 10**12, 2**40, 512 * 10**6]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"shares": "measured", "local_nodes": "1,1,1", "memory": None}, {"shares": "measured"}),
        ({"shares": "7,2,1", "local_nodes": None, "memory": None}, {"shares": "7,1"}),
        (
            {"shares": "7,2,1", "local_nodes": "1,0.5,0.2", "memory": "4GB,2GB,1GB"},
            {"shares": "7,1", "local_nodes": "1,0.2", "memory": "4GB,1GB"},
        ),
        (
            {"shares": "7,2,1", "local_nodes": "1,0.5,0.2", "memory": "4GB"},
            {"shares": "7,1", "local_nodes": "1,0.2", "memory": "4GB"},
        ),
        ({"shares": "0,1,0", "local_nodes": "1,1,1", "memory": None}, None),
    ],
)
def test_options_of_the_remaining_nodes_are_selected(options: dict[str, Any], left: dict[str, str] | None) -> None:
    assert options_of([0, 2], **options) == left
