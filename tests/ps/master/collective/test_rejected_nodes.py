"""Nodes that a run does not need, or that do not reach another one, are asked again when others are gone."""

from __future__ import annotations

from evener.ps.master.collective.rank_table import RejectedNodes
from evener.ps.master.nodes import NodeRecord


def test_a_rejected_node_is_asked_again_when_another_one_is_lost_and_not_because_of_its_own_loss() -> None:
    node = NodeRecord("c")
    node.not_ready.add("run")
    rejected = RejectedNodes("run")
    rejected.add(node)
    rejected.lost(("c",))
    rejected.ask_again(is_settled=True)
    assert node.not_ready == {"run"}
    rejected.lost(("b",))
    rejected.ask_again(is_settled=True)
    assert node.not_ready == set()
    assert node.ready == "run"
