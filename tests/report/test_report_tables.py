"""Tables: what stands in which cell."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evener.records.plan import Assignment, Plan
from evener.records.profile import BatchTiming, ClusterProfile, DeviceProfile, LinkProfile, TaskTiming, Throughput
from evener.report.planning_tables import links_table, profile_table, timing_table
from evener.report.tables import comparison_table, plan_table, predicted_table, record_table, summary
from support.fake_runs import NODES, fake_plan, fake_run


def plain(value: object) -> str:
    return value.plain if isinstance(value, Text) else str(value or "")


def rows(table: Table) -> list[tuple[str, ...]]:
    return list(zip(*([plain(cell) for cell in column.cells] for column in table.columns), strict=True))


def headers(table: Table) -> list[str]:
    return [plain(column.header) for column in table.columns]


def printed(table: Table, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def device(
    node: str, *throughputs: Throughput, timings: tuple[TaskTiming, ...] = (), speed: float = 1.0
) -> DeviceProfile:
    return DeviceProfile(
        node=node,
        device="cpu",
        model="a CPU",
        cores=8,
        memory_bytes=16_000_000_000,
        usable_memory_bytes=12_000_000_000,
        bandwidth=45.6e9,
        throughputs=throughputs,
        timings=timings,
        speed=speed,
    )


def test_device_has_a_row_per_precision_with_reasons_for_gaps() -> None:
    profile = ClusterProfile(
        devices=(
            device(
                "ada",
                Throughput(precision="fp32", matmul_flops=800e9, conv_flops=200e9),
                Throughput(precision="bf16", matmul_flops=90e9, reason="no convolution in it"),
                Throughput(precision="fp16", reason="the processor has no units for it"),
            ),
            device("bob", Throughput(precision="fp16", reason="the processor has no units for it"), speed=0.25),
            device("cleo"),
        )
    )
    table = profile_table(profile)
    assert headers(table)[-4:] == ["precision", "matmul", "conv", "score"]
    assert rows(table) == [
        ("ada", "cpu", "a CPU", "8", "16.0 GB", "45.6", "fp32", "800", "200", "400"),
        ("", "", "", "", "", "", "bf16", "90.0", "unsupported [1]", "-"),
        ("", "", "", "", "", "", "fp16", "unsupported [2]", "unsupported [2]", "-"),
        ("bob", "cpu", "a CPU (slowed to 25 %)", "8", "16.0 GB", "45.6", "fp16", *["unsupported [2]"] * 2, "-"),
        ("cleo", "cpu", "a CPU", "8", "16.0 GB", "45.6", "-", "-", "-", "-"),
    ]
    assert plain(table.caption) == (
        "Speeds in GFLOP/s; score: geometric mean of matmul and conv.\n"
        "[1] no convolution in it\n[2] the processor has no units for it"
    )


def test_links_are_in_microseconds_and_gigabytes_per_second() -> None:
    profile = ClusterProfile(
        devices=(device("ada"), device("bob")),
        links=(
            LinkProfile(source=0, target=1, alpha=120e-6, beta=8e-9),
            LinkProfile(source=1, target=0, alpha=0, beta=0, backend="nccl"),
        ),
    )
    assert rows(links_table(profile)) == [
        ("ada cpu", "bob cpu", "gloo", "120", "0.125"),
        ("bob cpu", "ada cpu", "nccl", "0", "-"),
    ]


def test_timings_are_per_sample_with_a_column_per_batch_size() -> None:
    def timing(*sizes: int) -> TaskTiming:
        batches = (BatchTiming(samples=n, forward_seconds=1e-3, backward_seconds=3e-3) for n in sizes)
        return TaskTiming(
            task="digits", precision="fp32", batches=tuple(batches), update_seconds=2e-3, max_samples=max(sizes) * 9
        )

    profile = ClusterProfile(devices=(device("ada", timings=(timing(1, 4),)), device("bob", timings=(timing(4, 16),))))
    table = timing_table(profile)
    assert headers(table) == ["task", "precision", "node", "device", "1", "4", "16", "update", "largest batch"]
    assert rows(table) == [
        ("digits", "fp32", "ada", "cpu", "4.00 ms", "1.00 ms", "-", "2.00 ms", "36"),
        ("digits", "fp32", "bob", "cpu", "-", "1.00 ms", "250 µs", "2.00 ms", "144"),
    ]


def test_plan_shows_shares_reasons_and_rejected_alternatives() -> None:
    plan = fake_plan()
    table = plan_table(plan)
    assert plain(table.title) == "Plan: data, 100 samples a step"
    assert rows(table) == [
        ("ada", "cuda:0", "67", "67 %", "1,111 samples/s; done with the others"),
        ("bob", "cuda:0", "28", "28 %", "476 samples/s; done with the others"),
        ("pi-in-the-attic", "cpu", "5", "5.0 %", "83 samples/s; done with the others"),
        ("equal shares", "-", "-", "-", "not used: all would wait for the slowest (410 ms a step)"),
        ("old-laptop cpu", "-", "-", "-", "not used: would slow the others down by 12 %"),
    ]
    assert [row.end_section for row in table.rows] == [False, False, True, False, False]
    assert plain(table.caption) == ("Predicted: 69.3 ms a step, 1.34 times as fast as the best device alone (93.0 ms)")


def test_caption_of_a_plan_says_within_which_seconds_four_of_five_steps_are() -> None:
    plan = fake_plan()
    assert plan.prediction is not None
    sure = msgspec.structs.replace(plan.prediction, step_seconds=0.06, spread=0.2)
    assert sure.interval == pytest.approx((0.05, 0.072))
    caption = plain(plan_table(msgspec.structs.replace(plan, prediction=sure)).caption)
    assert caption.startswith("Predicted: 60.0 ms a step (four times of five 50.0 ms to 72.0 ms), ")


def test_plan_without_a_prediction_has_no_caption() -> None:
    assignment = Assignment(rank=0, node="ada", device="cpu", samples=4)
    table = plan_table(Plan(strategy="serial", batch_size=16, accumulate=4, assignments=(assignment,)))
    assert plain(table.title) == "Plan: serial, 16 samples a step, in 4 micro-batches"
    assert table.caption is None
    assert rows(table) == [("ada", "cpu", "4", "100 %", "")]


def test_record_shows_the_work_and_waiting_of_every_node() -> None:
    run = fake_run(num_steps=10)
    first = msgspec.structs.replace(run.nodes[0], seconds_computing=30.0, seconds_waiting=10.0, bytes_sent=12_300_000)
    table = record_table(msgspec.structs.replace(run, nodes=(first, *run.nodes[1:]), seconds=75.0))
    assert plain(table.title).startswith("Run: digits, 1 min 15 s, ")
    assert rows(table)[0] == ("ada", "67 %", "30.0 s", "10.0 s", "25 %", "12.3", "3.46 GB")
    assert len(rows(table)) == 3


def test_comparison_has_a_row_per_run_with_its_speed_up() -> None:
    run = fake_run(num_steps=3)
    halves = tuple(msgspec.structs.replace(one, seconds_computing=1.0, seconds_waiting=1.0) for one in run.nodes)
    slow = msgspec.structs.replace(
        run, samples_per_second=100.0, seconds=40.0, validation_accuracy=None, nodes=halves[:1]
    )
    fast = msgspec.structs.replace(run, samples_per_second=250.0, seconds=16.0, validation_accuracy=0.875, nodes=halves)
    assert rows(comparison_table({"alone": slow, "evener": fast})) == [
        ("alone", "1", "40.0 s", "100", "1.00", "-", "50 %"),
        ("evener", "3", "16.0 s", "250", "2.50", "87.50 %", "50 %"),
    ]
    assert rows(comparison_table({})) == []


def test_prediction_is_beside_the_measured_median() -> None:
    run = fake_run(num_steps=50)
    table = predicted_table(run)
    assert [row[0] for row in rows(table)] == [
        "whole step",
        "computing (slowest rank)",
        "waiting for others",
        "sent by a rank",
    ]
    assert rows(table)[0][1] == "69.3 ms"
    assert rows(table)[3][1:] == ("44.0 MB", "44.0 MB", "+0.0 %")
    assert plain(table.caption) == "The shares were changed 2 times after this prediction."
    once = msgspec.structs.replace(run, events=run.events[:1])
    assert plain(predicted_table(once).caption) == "The shares were changed once after this prediction."
    never = msgspec.structs.replace(run, events=())
    assert predicted_table(never).caption is None


def test_prediction_error_is_relative_to_the_measurement() -> None:
    run = fake_run((10,), NODES[:1], num_steps=1)
    step = msgspec.structs.replace(run.steps[0], seconds=0.024)
    assert run.plan.prediction is not None
    prediction = msgspec.structs.replace(run.plan.prediction, step_seconds=0.018)
    plan = msgspec.structs.replace(run.plan, prediction=prediction)
    table = predicted_table(msgspec.structs.replace(run, plan=plan, steps=(step,)))
    assert rows(table)[0] == ("whole step", "18.0 ms", "24.0 ms", "-25.0 %")


@pytest.mark.parametrize("without", ["prediction", "steps"])
def test_table_without_comparable_values_shows_a_message(without: str) -> None:
    run = fake_run(num_steps=2)
    if without == "steps":
        run = msgspec.structs.replace(run, steps=())
    else:
        run = msgspec.structs.replace(run, plan=msgspec.structs.replace(run.plan, prediction=None))
    assert rows(predicted_table(run)) == []
    assert plain(predicted_table(run).caption).startswith("Nothing to compare:")


def test_names_are_printed_whole_without_markup() -> None:
    name = "[red]node[/red]-with-a-very-long-name-that-is-wider-than-its-column.example.org"
    text = printed(record_table(fake_run((10,), ((name, "cpu", 1e-3),), num_steps=1)), width=90)
    folded = [line.strip().split("  ")[0] for line in text.splitlines()[4:]]
    assert name in "".join(folded)


def test_summary_has_the_documented_keys_as_json() -> None:
    run = fake_run(num_steps=4)
    read = json.loads(json.dumps(summary(run)))
    assert list(read) == [
        "task",
        "strategy",
        "seconds",
        "samples_per_second",
        "validation_accuracy",
        "final_loss",
        "nodes",
    ]
    assert read["seconds"] == run.seconds
    assert read["samples_per_second"] == run.samples_per_second
    assert read["validation_accuracy"] == run.validation_accuracy
    assert read["final_loss"] == run.final_loss
    assert read["nodes"] == [
        {
            "name": node.name,
            "share": node.share,
            "seconds_computing": node.seconds_computing,
            "seconds_waiting": node.seconds_waiting,
            "bytes_sent": node.bytes_sent,
        }
        for node in run.nodes
    ]


def test_plan_for_one_node_is_not_compared_with_itself() -> None:
    assert "times as fast as the best device alone" in plain(plan_table(fake_plan()).caption)
    caption = plain(plan_table(fake_plan((100,), NODES[:1])).caption)
    assert caption.startswith("Predicted: ")
    assert "alone" not in caption


def test_plan_slower_than_one_node_gives_advice() -> None:
    plan = fake_plan()
    assert plan.prediction is not None
    slower = msgspec.structs.replace(plan.prediction, alone_seconds=plan.prediction.step_seconds / 2)
    caption = plain(plan_table(msgspec.structs.replace(plan, prediction=slower)).caption)
    assert "longer than on the best device alone" in caption
    assert "measure again when the machine is idle" in caption
