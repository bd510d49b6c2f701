"""Profiles of hypothetical clusters."""

from __future__ import annotations

import pytest

from evener.oracle.catalogue import CARDS
from evener.oracle.cost.topology import Topology
from evener.oracle.hypothetical_cluster import NETWORKS, NODES, hypothetical_profile
from evener.records.errors import InvalidValue


def test_machines_are_counted_and_joined() -> None:
    profile = hypothetical_profile("2xv100-node, h200", "1gbe")
    assert [device.node for device in profile.devices] == ["node-0"] * 4 + ["node-1"] * 4 + ["node-2"]
    assert profile.devices[5].device == "cuda:1"
    assert profile.devices[8].model == "H200-SXM"
    topology = Topology(profile)
    assert 1 / topology.ring(range(4)).beta > 1e11
    assert 1 / topology.ring(range(9)).beta == pytest.approx(0.94 * 125e6)


def test_the_last_machine_is_repeated_to_reach_the_requested_size() -> None:
    profile = hypothetical_profile("h200,2xv100-node", "1gbe", at_least=16)
    assert [device.model for device in profile.devices] == ["H200-SXM"] + 16 * ["Tesla V100-SXM2-16GB"]
    assert hypothetical_profile("v100", at_least=1) == hypothetical_profile("v100")


@pytest.mark.parametrize("name", [*NODES, *CARDS])
def test_every_template_is_a_valid_profile(name: str) -> None:
    profile = hypothetical_profile(f"3x{name}")
    assert len(profile.devices) == 3 * (NODES[name].devices if name in NODES else 1)
    assert all(device.throughput("fp32") and device.bandwidth for device in profile.devices)


@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_joins_machines(network: str) -> None:
    assert 1 / Topology(hypothetical_profile("2xt4", network)).ring(range(2)).beta == pytest.approx(
        1 / NETWORKS[network].beta
    )


def test_cards_of_one_machine_use_its_bus_and_others_use_their_links() -> None:
    profile = hypothetical_profile("2xrtx3090:4,a100-node")
    assert [device.node for device in profile.devices] == 4 * ["node-0"] + 4 * ["node-1"] + 8 * ["node-2"]
    topology = Topology(profile)
    assert 1 / topology.ring(range(4)).beta == pytest.approx(0.8 * 15.75e9)
    assert 1 / topology.ring(range(8, 16)).beta == pytest.approx(0.8 * 300e9)
    assert 1 / topology.ring(range(16)).beta == pytest.approx(0.94 * 1.25e9)


@pytest.mark.parametrize(
    ("machines", "network", "field", "value", "suggested"),
    [
        ("4xtoaster", "1gbe", "a machine of --machines", "toaster", "v100-node"),
        ("rtx309", "1gbe", "a machine of --machines", "rtx309", "rtx3090"),
        ("v100-node:2", "1gbe", "a card of --machines", "v100-node", "v100"),
        ("0xv100", "1gbe", "--machines", "0xv100", "4xv100-node"),
        ("v100:0", "1gbe", "--machines", "v100:0", "4xv100-node"),
        ("v100", "token-ring", "--network", "token-ring", "infiniband"),
    ],
)
def test_unknown_machines_and_networks_are_refused(
    machines: str, network: str, field: str, value: str, suggested: str
) -> None:
    with pytest.raises(InvalidValue) as caught:
        hypothetical_profile(machines, network)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert suggested in caught.value.allowed
    assert len(str(caught.value)) < 160
