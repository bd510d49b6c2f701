"""Messages share the links that they pass."""

from __future__ import annotations

import pytest

from evener.oracle.cost.topology import LinkCost, Topology, all_reduce_seconds
from evener.records.errors import InvalidValue
from evener.records.profile import ClusterProfile, Fabric, LinkProfile
from support.imagined_machines import device

NVLINK = Fabric(name="NVLink", within="node", alpha=1.0, beta=0.001)
NETWORK = Fabric(name="network", within="leaf", alpha=5.0, beta=0.1, shared_bandwidth=20.0)
TREE = Fabric(name="tree", within="cluster", alpha=9.0, beta=0.1, shared_bandwidth=5.0)


def nodes(count: int, per_node: int, per_leaf: int = 100, fabrics: tuple[Fabric, ...] = (NVLINK, NETWORK)) -> Topology:
    devices = tuple(
        device(f"n{i // per_node}", i % per_node, leaf=f"leaf{i // per_node // per_leaf}")
        for i in range(count * per_node)
    )
    return Topology(ClusterProfile(devices=devices, fabrics=fabrics))


def test_ring_within_a_node_does_not_leave_it() -> None:
    assert nodes(2, 4).ring(range(4)) == LinkCost(1.0, 0.001)


def test_ring_has_its_slowest_hop_and_mean_latency() -> None:
    assert nodes(2, 4).ring(range(8)) == LinkCost((6 * 1.0 + 2 * 5.0) / 8, 0.1)


def test_rings_between_nodes_share_the_ports_of_their_nodes() -> None:
    topology = nodes(2, 4)
    assert topology.ring([0, 4], [1, 5]).beta == 0.1  # two flows: 20 / 2 bytes a second each
    assert topology.ring([0, 4], [1, 5], [2, 6], [3, 7]).beta == pytest.approx(4 / 20)


def test_traffic_between_leaves_shares_few_links() -> None:
    topology = nodes(4, 2, per_leaf=2, fabrics=(NVLINK, NETWORK, TREE))
    assert topology.ring(range(8)).beta == pytest.approx(1 / 5)
    assert topology.ring(range(8)).alpha == pytest.approx((4 * 1 + 2 * 5 + 2 * 9) / 8)
    assert topology.ring([0, 4], [1, 5]).beta == pytest.approx(2 / 5)


def test_a_ring_visits_nodes_one_by_one_for_any_order_of_ranks() -> None:
    topology = nodes(2, 4)
    assert topology.ordered([7, 0, 5, 2]) == [0, 2, 5, 7]
    assert topology.ring([0, 4, 1, 5, 2, 6, 3, 7]) == topology.ring(range(8))


def test_pipeline_neighbours_communicate_in_chain_order() -> None:
    assert nodes(2, 2).chain([0, 1]) == LinkCost(1.0, 0.001)
    assert nodes(2, 2).chain([0, 2]).beta == 0.1
    assert nodes(2, 2).chain([0]) == LinkCost(0.0, 0.0)


def test_all_messages_to_a_hub_pass_its_one_link() -> None:
    topology = nodes(5, 1, fabrics=(Fabric(name="network", within="leaf", alpha=5.0, beta=0.1),))
    assert topology.star(0, range(5)).beta == pytest.approx(4 * 0.1)


@pytest.mark.parametrize(("slow", "beta"), [(0.1, 3 * 0.1), (0.2, 3 * 0.1), (0.5, 0.5)])
def test_slow_message_to_a_hub_does_not_slow_down_the_others(slow: float, beta: float) -> None:
    links = tuple(LinkProfile(source=0, target=i, alpha=1.0, beta=slow if i == 3 else 0.1) for i in (1, 2, 3))
    topology = Topology(ClusterProfile(devices=tuple(device(name, 0) for name in "abcd"), links=links))
    assert topology.star(0, range(4)).beta == pytest.approx(beta)


def test_missing_links_cost_as_much_as_the_worst_of_their_kind() -> None:
    links = (
        LinkProfile(source=0, target=1, alpha=1.0, beta=0.01),
        LinkProfile(source=1, target=2, alpha=2.0, beta=0.5),
        LinkProfile(source=0, target=3, alpha=4.0, beta=0.2),
    )
    devices = (device("a", 0), device("a", 1), device("b", 0), device("c", 0))
    topology = Topology(ClusterProfile(devices=devices, links=links))
    assert topology.chain([0, 1]) == LinkCost(1.0, 0.01)
    assert topology.chain([1, 2]) == LinkCost(2.0, 0.5)
    assert topology.chain([2, 3]) == LinkCost(4.0, 0.5)


def test_messages_within_a_node_share_its_bandwidth_if_specified() -> None:
    host = Fabric(name="host", within="node", alpha=1.0, beta=0.001, shared_bandwidth=100.0)
    assert nodes(1, 4, fabrics=(host,)).ring(range(4)).beta == pytest.approx(4 / 100)


def test_calibration_scales_link_costs() -> None:
    devices = (device("a"), device("b"))
    assert Topology(ClusterProfile(devices=devices, fabrics=(NETWORK,), learnt=2.0)).ring([0, 1]) == LinkCost(10.0, 0.2)


def test_devices_without_any_link_are_refused() -> None:
    topology = Topology(ClusterProfile(devices=(device("a"), device("b"))))
    with pytest.raises(InvalidValue) as caught:
        topology.ring([0, 1])
    assert caught.value.field == "links"


def test_message_and_ring_costs_match_literal_values() -> None:
    assert LinkCost(0.5, 0.001).seconds(1000) == pytest.approx(1.5)
    assert all_reduce_seconds(1000, 4, 0.5, 0.001) == pytest.approx(6 * (0.5 + 0.25))
    assert all_reduce_seconds(1000, 1, 0.5, 0.001) == 0


@pytest.mark.parametrize(("alpha", "beta", "field"), [(-1.0, 0.0, "alpha"), (0.0, -1.0, "beta")])
def test_link_with_negative_time_is_refused(alpha: float, beta: float, field: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        LinkCost(alpha, beta)
    assert caught.value.field == field
