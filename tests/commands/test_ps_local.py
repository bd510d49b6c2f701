"""A private master and its nodes, on this machine."""

from __future__ import annotations

import pytest

from evener.commands.private_master import local_cluster
from evener.launch.nodes import NodeSpec
from evener.ps.client import MasterClient


@pytest.mark.parametrize("encrypted", [False, True])
def test_local_cluster_works_with_and_without_tls(encrypted: bool) -> None:
    with (
        local_cluster([NodeSpec(name="a", threads=1)], 10.0, thin=True, encrypted=encrypted) as cluster,
        MasterClient(cluster.address, cluster.token, 10.0) as client,
    ):
        cluster.wait_for_nodes(client)
        assert cluster.token.insecure is not encrypted
        assert [(node.name, node.state) for node in client.ask().nodes] == [("a", "present")]
