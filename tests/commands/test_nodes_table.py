"""`evener nodes` on a narrow terminal: a table of short cells, and below it the whole reasons."""

from __future__ import annotations

import io

from rich.console import Console

from evener.commands.up import nodes_table, reasons_of
from evener.ps.protocol.status import ClusterStatus, NodeStatus


def test_reasons_of_nodes_stand_below_the_table_whole() -> None:
    def node(name: str, state: str, reason: str, doing: str, seconds: float | None = None) -> NodeStatus:
        return NodeStatus(
            name=name, address="10.0.0.2, port 40000", device="cpu", score=None, state=state, reason=reason,
            seconds=seconds, doing=doing, samples=0, samples_per_second=0.0, bytes_sent=0, bytes_received=0,
        )  # fmt: skip

    long = "cannot take part: " + "the training data of this node are not those of the others, " * 3
    nodes = (
        node("ada", "present", "it joined", "works"),
        node("bob", "present", "it joined", long),
        node("eve", "excluded", "it has been silent for 6 s", "waits", 20.0),
    )
    status = ClusterStatus(address="10.0.0.1:7117", nodes=nodes)
    assert list(reasons_of(status)) == [("bob", long), ("eve", "it has been silent for 6 s")]
    shown = io.StringIO()
    Console(width=80, file=shown).print(nodes_table(status))
    assert "excluded for 20 s" in shown.getvalue()
    assert "cannot take part" in shown.getvalue()
    assert "training data" not in shown.getvalue()
