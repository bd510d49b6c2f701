"""What a record adds up to."""

from __future__ import annotations

import msgspec
import pytest

from evener.records.record import NodeStep, Step
from evener.report.measured import node_phases, spans, typical_step, waiting_fraction
from support.fake_runs import fake_run


def entry(step: int, seconds: float, *nodes: NodeStep) -> Step:
    return Step(step=step, epoch=0, samples=8, loss=1.0, seconds=seconds, nodes=nodes)


def node(compute: float, wait: float, sent: int = 0, io: float = 0.0, update: float = 0.0) -> NodeStep:
    return NodeStep(
        samples=4, io_seconds=io, compute_seconds=compute, wait_seconds=wait, update_seconds=update, sent_bytes=sent
    )


@pytest.mark.parametrize(
    ("numbers", "every", "expected"),
    [
        ([1, 2, 3], 1, [1, 1, 1]),
        ([4, 8, 12, 14], 4, [4, 4, 4, 2]),
        ([101, 102], 1, [1, 1]),  # resumed at step 100
        ([3], 8, [3]),
        ([], 1, []),
    ],
)
def test_entry_spans_the_steps_since_the_previous_one(numbers: list[int], every: int, expected: list[int]) -> None:
    steps = tuple(entry(number, 1.0) for number in numbers)
    assert spans(msgspec.structs.replace(fake_run(num_steps=0), steps=steps, every=every)) == expected


def test_typical_step_is_the_median_of_the_slowest_rank() -> None:
    steps = (
        entry(2, 90.0, node(80.0, 10.0), node(1.0, 89.0)),  # the first is slow: kernels are chosen
        entry(4, 2.0, node(0.2, 1.6, sent=100), node(1.2, 0.4, sent=300, io=0.2, update=0.2)),
        entry(6, 2.2, node(0.2, 1.6, sent=100), node(1.2, 0.4, sent=300, io=0.2, update=0.2)),
    )
    typical = typical_step(msgspec.structs.replace(fake_run(num_steps=0), steps=steps, every=2))
    assert typical is not None
    assert typical == pytest.approx((1.1, 0.8, 0.2, 150))


def test_typical_step_averages_steps_with_and_without_an_exchange() -> None:
    """Three of four batches send statistics alone, as in a YOLO that accumulates gradients."""
    steps = tuple(
        entry(number, 2.0 if number % 4 == 0 else 1.0, node(0.5, 0.1, sent=1000 if number % 4 == 0 else 8))
        for number in range(1, 18)
    )
    record = fake_run(num_steps=0)
    record = msgspec.structs.replace(record, steps=steps, plan=msgspec.structs.replace(record.plan, local_steps=4))
    typical = typical_step(record)
    assert typical is not None
    assert typical.step_seconds == pytest.approx(1.25)
    assert typical.sent_bytes == pytest.approx((4 * 1000 + 13 * 8) / 17)
    short = typical_step(msgspec.structs.replace(record, steps=steps[:2]))
    assert short is not None
    assert (short.step_seconds, short.sent_bytes) == pytest.approx((1.0, 8.0))


def test_run_without_steps_has_no_typical_step() -> None:
    assert typical_step(fake_run(num_steps=0)) is None


def test_phases_sum_over_the_steps_of_each_node() -> None:
    run = fake_run(num_steps=3)
    for rank, phases in enumerate(node_phases(run)):
        own = [step.nodes[rank] for step in run.steps]
        assert phases.name == run.nodes[rank].name
        assert phases.loading == pytest.approx(sum(step.io_seconds for step in own))
        assert phases.computing == pytest.approx(sum(step.compute_seconds for step in own))
        assert phases.updating == pytest.approx(sum(step.update_seconds for step in own))
        assert phases.waiting == pytest.approx(sum(step.wait_seconds for step in own))
        assert phases.seconds == pytest.approx(run.nodes[rank].seconds_computing + run.nodes[rank].seconds_waiting)


def test_steps_with_fewer_nodes_are_ignored_in_node_phases() -> None:
    run = fake_run(num_steps=2)
    alone = entry(3, 50.0, node(50.0, 0.0))
    longer = msgspec.structs.replace(run, steps=(*run.steps, alone))
    assert node_phases(longer) == node_phases(run)


def test_phases_without_steps_are_computing_and_waiting() -> None:
    run = fake_run(num_steps=5)
    phases = node_phases(msgspec.structs.replace(run, steps=()))
    assert [(one.computing, one.waiting) for one in phases] == [
        (one.seconds_computing, one.seconds_waiting) for one in run.nodes
    ]


def test_waiting_fraction_is_of_the_time_of_all_nodes() -> None:
    run = fake_run(num_steps=1)
    nodes = tuple(
        msgspec.structs.replace(one, seconds_computing=computing, seconds_waiting=waiting)
        for one, computing, waiting in zip(run.nodes, (9.0, 5.0, 10.0), (1.0, 5.0, 0.0), strict=True)
    )
    assert waiting_fraction(nodes) == pytest.approx(0.2)
    assert waiting_fraction([]) == 0.0
