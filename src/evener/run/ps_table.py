"""What `evener nodes` shows: a table of the nodes, and a line on the run."""

from __future__ import annotations

from rich.table import Table

from evener.ps.status import ClusterStatus, NodeStatus, RunStatus
from evener.report.grid import grid
from evener.report.text import human_bytes

_HEADS = ("node", "address", "device", ">GFLOP/s", "does", ">samples/s", ">sent", ">received", "state")


def situation_table(situation: ClusterStatus) -> Table:
    """All nodes."""
    return grid(f"Nodes of the master at {situation.address}", _HEADS, [_row(node) for node in situation.nodes])


def run_line(run: RunStatus) -> str:
    """How the run is doing, and where its results will be."""
    accuracy = "" if run.accuracy is None else f", accuracy {run.accuracy:.2%}"
    epochs = f" of {run.epochs}" if run.epochs else ""
    return (
        f"run {run.run} ({run.protocol}): epoch {run.epoch + 1}{epochs}, {run.version} updates, loss {run.loss:.4f}"
        f"{accuracy}; results will be in {run.folder}"
    )


def state_words(node: NodeStatus) -> str:
    """The state of a node, with what is left of it and why: `benched for 12 s: ...`."""
    seconds = "" if node.seconds is None else f" for {node.seconds:.0f} s"
    return node.state if node.state == "present" else f"{node.state}{seconds}: {node.reason}"


def _row(node: NodeStatus) -> tuple[str, ...]:
    return (
        node.name,
        node.address,
        node.device,
        "" if node.score is None else f"{node.score:,.0f}",
        node.doing,
        f"{node.samples_per_second:,.0f}" if node.samples_per_second else "",
        human_bytes(node.bytes_sent),
        human_bytes(node.bytes_received),
        state_words(node),
    )
