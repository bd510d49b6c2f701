"""Machines that one does not have."""

from __future__ import annotations

import pytest

from evener.oracle.catalogue import CARDS
from evener.oracle.cost.topology import Topology
from evener.oracle.hypothetical_cluster import NETWORKS, NODES, imagine
from evener.records.errors import InvalidValue


def test_machines_are_counted_and_joined() -> None:
    profile = imagine("2xv100-node, h200", "1gbe")
    assert [device.node for device in profile.devices] == ["node-0"] * 4 + ["node-1"] * 4 + ["node-2"]
    assert profile.devices[5].device == "cuda:1"
    assert profile.devices[8].model == "H200-SXM"
    topology = Topology(profile)
    assert 1 / topology.ring(range(4)).beta > 1e11
    assert 1 / topology.ring(range(9)).beta == pytest.approx(0.94 * 125e6)


def test_more_of_the_last_kind_are_imagined_if_more_are_asked_for() -> None:
    profile = imagine("h200,2xv100-node", "1gbe", at_least=16)
    assert [device.model for device in profile.devices] == ["H200-SXM"] + 16 * ["Tesla V100-SXM2-16GB"]
    assert imagine("v100", at_least=1) == imagine("v100")


@pytest.mark.parametrize("name", [*NODES, *CARDS])
def test_every_template_is_a_valid_profile(name: str) -> None:
    profile = imagine(f"3x{name}")
    assert len(profile.devices) == 3 * (NODES[name].devices if name in NODES else 1)
    assert all(device.throughput("fp32") and device.bandwidth for device in profile.devices)


@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_joins_machines(network: str) -> None:
    assert 1 / Topology(imagine("2xt4", network)).ring(range(2)).beta == pytest.approx(1 / NETWORKS[network].beta)


def test_cards_of_one_machine_are_joined_by_its_bus_and_others_keep_their_own_links() -> None:
    profile = imagine("2xrtx3090:4,a100-node")
    assert [device.node for device in profile.devices] == 4 * ["node-0"] + 4 * ["node-1"] + 8 * ["node-2"]
    topology = Topology(profile)
    assert 1 / topology.ring(range(4)).beta == pytest.approx(0.8 * 15.75e9)
    assert 1 / topology.ring(range(8, 16)).beta == pytest.approx(0.8 * 300e9)
    assert 1 / topology.ring(range(16)).beta == pytest.approx(0.94 * 1.25e9)


@pytest.mark.parametrize(
    ("machines", "network", "message"),
    [
        ("4xtoaster", "1gbe", r"a machine of --machines must .*`evener catalogue`.*such as v100-node.*got 'toaster'$"),
        ("rtx309", "1gbe", r"a machine of --machines must be .*, such as rtx3090, .*, got 'rtx309'$"),
        ("v100-node:2", "1gbe", r"a card of --machines must be .*, such as v100.*, got 'v100-node'$"),
        ("0xv100", "1gbe", r"--machines must be such as 4xv100-node, .*, got '0xv100'"),
        ("v100:0", "1gbe", r"--machines must be such as 4xv100-node, .*, got 'v100:0'"),
        ("v100", "token-ring", r"--network must be one of wifi5, .*1gbe, .*, infiniband, got 'token-ring'"),
    ],
)
def test_what_is_not_known_is_refused(machines: str, network: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message) as caught:
        imagine(machines, network)
    assert len(str(caught.value)) < 160
