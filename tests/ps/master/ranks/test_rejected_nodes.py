"""Nodes that a run does not need, or that do not reach another one, are asked again."""

from __future__ import annotations

from evener.membership.generation import Generation
from evener.ps.master.nodes import NodeRecord
from evener.ps.master.ranks.rank_table import LINE_RETRY_S, RejectedNodes


def generation(*, lost: tuple[str, ...] = (), joined: tuple[str, ...] = ()) -> Generation:
    return Generation(number=2, participants=(), reason="", is_urgent=bool(lost), lost=lost, joined=joined)


def rejected_node() -> tuple[NodeRecord, RejectedNodes]:
    node = NodeRecord("c")
    node.left_out_of.add("run")
    return node, RejectedNodes("run")


def test_rejected_node_is_asked_again_only_after_another_loss() -> None:
    node, rejected = rejected_node()
    rejected.add(node)
    rejected.changed(generation(lost=("c",)))
    rejected.ask_again(1e9, is_computing=True)
    assert node.left_out_of == {"run"}
    rejected.changed(generation(lost=("b",)))
    rejected.ask_again(0.0, is_computing=True)
    assert node.left_out_of == set()
    assert node.ready_for == "run"


def test_unreachable_node_is_asked_again_and_its_reason_logged_once() -> None:
    node, rejected = rejected_node()
    assert rejected.add_cut(node, "c does not reach a", 100.0)
    rejected.ask_again(99.0 + LINE_RETRY_S, is_computing=True)
    rejected.ask_again(100.0 + LINE_RETRY_S, is_computing=False)
    assert node.left_out_of == {"run"}
    rejected.ask_again(100.0 + LINE_RETRY_S, is_computing=True)
    assert node.left_out_of == set()
    assert not rejected.add_cut(node, "c does not reach a", 200.0)
    rejected.changed(generation(joined=("c",)))
    assert rejected.add_cut(node, "c does not reach a", 300.0)


def test_retry_pauses_double_if_each_retry_restarts_the_run() -> None:
    node, rejected = rejected_node()
    for now, pause in ((0.0, 1), (1000.0, 2), (2000.0, 4)):
        node.left_out_of.add("run")
        rejected.add_cut(node, "c does not reach a", now)
        rejected.ask_again(now + pause * LINE_RETRY_S - 1.0, is_computing=True, restarts=True)
        assert node.left_out_of == {"run"}
        rejected.ask_again(now + pause * LINE_RETRY_S, is_computing=True, restarts=True)
        assert node.left_out_of == set()
