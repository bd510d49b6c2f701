"""Local nodes: what the option means, and where the nodes run."""

import pytest

from evener.errors import InvalidValue
from evener.launch.nodes import LocalNode, local_nodes, parse_local_nodes, place


def test_three_speeds_are_three_nodes_of_one_thread_on_one_core_each() -> None:
    nodes = parse_local_nodes("1.0,0.5,0.25")
    assert [node.name for node in nodes] == ["node-0", "node-1", "node-2"]
    assert all(len(node.cores) == 1 and node.threads == 1 for node in nodes)
    ratios = [node.speed_at(0) / nodes[0].speed_at(0) for node in nodes]
    assert ratios == pytest.approx([1.0, 0.5, 0.25])


def test_a_speed_changes_at_its_step() -> None:
    [node] = parse_local_nodes("1.0@40=0.33@60=0.5")
    assert [node.speed_at(step) for step in (0, 39, 40, 59, 60, 1000)] == [1.0, 1.0, 0.33, 0.33, 0.5, 0.5]


@pytest.mark.parametrize("text", ["", " ", "1.0,", "fast", "0", "-1", "1.5", "1.0@x=1", "1@5=0", "1@9=0.5@3=1", "nan"])
def test_wrong_speeds_are_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"^--local-nodes must be .*got"):
        parse_local_nodes(text)


def test_memory_has_to_be_given_for_every_node() -> None:
    assert [n.memory_bytes for n in parse_local_nodes("1,1", [5, 6])] == [5, 6]
    with pytest.raises(InvalidValue, match=r"one a node \(3\)"):
        parse_local_nodes("1,1,1", [5, 6])
    with pytest.raises(InvalidValue, match=r"one a device \(1\)"):
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
def test_no_core_holds_more_than_one_whole_node(
    speeds: list[float], cores: int, places: list[int], shrink: float
) -> None:
    found, factor = place(speeds, cores)
    assert found == places
    assert factor == pytest.approx(shrink)


def test_devices_are_nodes_at_full_speed() -> None:
    assert local_nodes(["cuda:0", "cpu"]) == [
        LocalNode(name="node-0", device="cuda:0"),
        LocalNode(name="node-1", device="cpu"),
    ]
