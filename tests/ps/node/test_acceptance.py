"""A node's user says whose runs it takes part in; the others go on without it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from evener.ps.node.acceptance import Acceptance
from evener.ps.protocol.job import Job
from support.agreements import SYNC
from support.linear_engine import job, weights
from support.master_in_threads import Stand, plane

BUILT_IN = replace(job(SYNC), task="digits", submitter="alice")


@pytest.mark.parametrize(
    ("acceptance", "allowed", "refused"),
    [
        (Acceptance(), [BUILT_IN, job(SYNC)], []),
        (
            Acceptance(built_in_only=True),
            [BUILT_IN],
            [replace(BUILT_IN, code="0" * 64), replace(BUILT_IN, task="/home/ada/task.py"), job(SYNC)],
        ),
        (Acceptance(submitters=frozenset({"alice"})), [BUILT_IN], [job(SYNC), replace(BUILT_IN, submitter="admin")]),
    ],
    ids=["all", "built-in", "submitters"],
)
def test_job_outside_the_acceptance_is_rejected_with_its_reason(
    acceptance: Acceptance, allowed: list[Job], refused: list[Job]
) -> None:
    for one in allowed:
        assert acceptance.objection(one) == ""
    for one in refused:
        reason = acceptance.objection(one)
        assert "--built-in-only" in reason or "the tasks of alice, not of" in reason


@pytest.mark.posix
def test_run_continues_without_a_node_that_does_not_accept_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with plane("a") as ps:
        monkeypatch.setattr(Stand, "accepts", Acceptance(submitters=frozenset({"alice"})))
        picky = ps.join("picky")
        record, _ = ps.run(job(SYNC), weights())
        assert [event.message for event in record.events if event.kind == "left out"] == [
            "node picky cannot take part: its user lets it run only the tasks of alice, not of admin"
        ]
        assert any("does not take part in linear" in sentence for sentence in picky.said)
        assert picky.mood.made == 0
