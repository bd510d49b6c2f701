"""`evener plan` and `evener experiment oracle-abci`: tables, advice, files; wrong words get a sentence."""

import csv
import json
from collections import Counter
from pathlib import Path

import pytest

from evener.plan import Assignment, Plan
from evener.record import TrainRecord
from evener.report.bars import plan_figure
from evener.report.html import write_page
from evener.run.commands import perform
from evener.run.config import RunConfig
from evener.schema import read_noun, write_noun
from support.commands import TINY, evener, evener_here


def test_a_plan_for_imagined_machines_is_ranked_saved_and_printed(tmp_path: Path) -> None:
    ran = evener("plan", "resnet50", "--machines", "2xh200", "--save", "plan.json", "--json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    plan = json.loads(ran.stdout.splitlines()[-1])
    assert plan["strategy"] == "serial"  # 10 Gbit/s between two H200 do not pay
    assert "alone" in plan["advice"]
    saved = read_noun(tmp_path / "plan.json", Plan)
    assert [a.samples for a in saved.assignments] == [plan["batch_size"]]


def test_fast_links_make_data_parallelism_pay(tmp_path: Path) -> None:
    ran = evener("plan", "resnet50", "--machines", "h200-node", "--batch-size", "512", "--json", cwd=tmp_path)
    plan = json.loads(ran.stdout.splitlines()[-1])
    assert plan["strategy"] == "data"
    assert sum(a["samples"] for a in plan["assignments"]) == 512


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("resnet50",), "cannot read cluster.json"),
        (("resnet50", "--machines", "h201"), "--machines must be such as 4xv100-node"),
        (("resnet50", "--machines", "h200", "--strategy", "foo"), "--strategy must be one of serial, data"),
        (("resnet50", "--machines", "h200", "--precision", "foo"), "--precision must be one of"),
        (("resnet50", "--machines", "h200", "--scale", "abc"), "--scale must be such as 1..1024"),
        (("resnet5", "--machines", "h200"), "there is no task 'resnet5'"),
    ],
)
def test_wrong_words_get_a_sentence(words: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    ran = evener_here("plan", *words, cwd=tmp_path)
    assert ran.returncode == 2
    assert sentence in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_published_settings_are_all_predicted(tmp_path: Path) -> None:
    ran = evener("experiment", "oracle-abci", "--csv", "abci.csv", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    with (tmp_path / "abci.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert Counter((row["strategy"], row["model"]) for row in rows) == {
        (strategy, model): count
        for strategy, count in (("data", 11), ("data+filter", 7), ("data+spatial", 7), ("filter", 5), ("channel", 5))
        for model in ("resnet50", "vgg16")
    }
    given = {(row["strategy"], row["model"], row["gpus"]): float(row["total_seconds"]) for row in rows}
    assert given["data", "resnet50", "1"] == pytest.approx(0.1834, rel=1e-3)
    assert given["data", "vgg16", "1"] == pytest.approx(0.2619, rel=1e-3)
    assert given["data", "vgg16", "8"] == pytest.approx(0.4547, rel=1e-3)
    for row in rows:
        parts = float(row["compute_seconds"]) + float(row["communication_seconds"])
        assert float(row["total_seconds"]) == pytest.approx(parts, abs=2e-6)


def staged(strategy: str, nodes: str, folder: Path, shares: str = "measured") -> TrainRecord:
    """The record of a run of `tiny`."""
    config = RunConfig(task=TINY, strategy=strategy, shares=shares, precision="fp64", local_nodes=nodes, output=folder)
    perform(config)
    return read_noun(folder / "record.json", TrainRecord)


def test_a_pipeline_says_before_the_first_step_what_it_will_send(tmp_path: Path) -> None:
    record = staged("pipeline", "1,1", tmp_path / "run")
    said = record.plan.prediction
    assert said is not None
    assert said.sent_bytes == pytest.approx(max(node.sent_bytes for node in record.steps[1].nodes), abs=1)
    parts = said.compute_seconds + said.communication_seconds + said.waiting_seconds
    assert said.step_seconds == pytest.approx(parts)
    assert said.communication_seconds > 0


def test_replicas_that_are_cut_elsewhere_predict_nothing(tmp_path: Path) -> None:
    assert staged("data+pipeline", "1,1,1", tmp_path / "run", "equal").plan.prediction is None


def test_the_plan_and_the_page_of_a_node_that_was_not_timed_predict_no_seconds(tmp_path: Path) -> None:
    perform(RunConfig(task=TINY, output=tmp_path / "run"))
    record = read_noun(tmp_path / "run" / "record.json", TrainRecord)
    [assignment] = read_noun(tmp_path / "run" / "plan.json", Plan).assignments
    assert (assignment.sample_seconds, assignment.fixed_seconds, record.plan.prediction) == (0.0, 0.0, None)
    assert [axes.get_xlabel() for axes in plan_figure(record.plan).axes] == ["samples"]
    write_page(tmp_path / "page.html", {"alone": record}, title="alone")
    assert "Nothing to compare: the plan holds no prediction" in (tmp_path / "page.html").read_text()


def test_a_plan_without_seconds_is_performed_by_its_samples(tmp_path: Path) -> None:
    parts = [Assignment(rank=rank, node=f"node-{rank}", device="cpu", samples=n) for rank, n in enumerate((7, 3))]
    write_noun(Plan(strategy="data", batch_size=10, assignments=tuple(parts)), tmp_path / "plan.json")
    perform(RunConfig(task=TINY, plan=tmp_path / "plan.json", epochs=1, local_nodes="1,1", output=tmp_path / "run"))
    step = read_noun(tmp_path / "run" / "record.json", TrainRecord).steps[0]
    assert [node.samples for node in step.nodes] == [7, 3]
