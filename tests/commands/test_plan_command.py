"""`evener plan` and `evener experiment oracle-abci`: tables, advice, files; wrong words get a sentence."""

import csv
import json
from collections import Counter
from pathlib import Path

import pytest

from evener.oracle.catalogue import CARDS
from evener.oracle.hypothetical_cluster import NETWORKS, NODES
from evener.oracle.zoo.networks import ZOO, default_options, draw
from evener.records.plan import Plan
from evener.records.schema import read_noun
from support.commands import evener, evener_here


def test_plan_for_hypothetical_machines_is_ranked_and_saved(tmp_path: Path) -> None:
    ran = evener("plan", "resnet50", "--machines", "2xh200", "--save", "plan.json", "--json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.splitlines()[0] == "planning"  # said at once, as the table takes seconds
    plan = json.loads(ran.stdout.splitlines()[-1])
    assert plan["strategy"] == "serial"  # 10 Gbit/s between two H200 do not pay
    assert "alone" in plan["advice"]
    saved = read_noun(tmp_path / "plan.json", Plan)
    assert [a.samples for a in saved.assignments] == [plan["batch_size"]]


def test_agreements_are_ranked_for_slow_lines(tmp_path: Path) -> None:
    words = ("plan", "resnet50", "--machines", "rtx3090,rtx3070,rtx3060", "--network", "100mbit", "--agreements")
    ran = evener(*words, "--save", "rounds.svg", "--json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    compared = json.loads(ran.stdout.splitlines()[-1])
    assert compared["plan"]["strategy"] == "serial"
    agreements = compared["agreements"]
    assert agreements["master"] == "node-0"
    assert agreements["chosen"] in agreements["costs"]
    assert agreements["exact"] == agreements["ranks"]
    rounds = {one["compression"]: one for one in agreements["costs"] if one["agreement"] == "local steps"}
    assert rounds.keys() == {"none", "bf16", "int8", "top-k"}
    assert rounds["none"]["sent_bytes"] > 100 * rounds["top-k"]["sent_bytes"]
    assert rounds["none"]["local_steps"] > rounds["top-k"]["local_steps"]
    picture = (tmp_path / "rounds.svg").read_text()
    assert "local steps" in picture
    assert "Matplotlib" not in ran.stderr


def test_agreements_of_a_task_are_those_that_its_optimizer_and_its_data_allow(tmp_path: Path) -> None:
    words = ("plan", "digits", "--machines", "rtx3090,rtx3070", "--network", "100mbit", "--agreements", "--json")
    ran = evener(*words, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    rounds = json.loads(ran.stdout.splitlines()[-1])["agreements"]["costs"]
    assert {one["compression"] for one in rounds if one["agreement"] == "sync"} == {"none", "bf16", "int8"}  # AdamW
    assert max(one["samples"] for one in rounds) == 1438  # of an epoch


def test_agreements_that_fit_no_memory_leave_the_plan(tmp_path: Path) -> None:
    words = ("plan", "vgg16", "--machines", "3xrtx3060", "--batch-size", "4000", "--agreements", "--save", "x.png")
    ran = evener(*words, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "no agreement of a master's nodes fits" in ran.stdout + ran.stderr
    assert not (tmp_path / "x.png").exists()


def test_plans_are_compared_by_money_and_energy(tmp_path: Path) -> None:
    words = ("plan", "resnet50", "--machines", "rtx3090,rtx3070", "--network", "10gbe", "--strategy", "data", "--json")
    ran = evener(*words, "--prices", "node-0=0.5,node-1=0.1", "--watts", "350", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    expenses = json.loads(ran.stdout.splitlines()[-1])["expenses"]
    assert {(one["strategy"], *one["nodes"]) for one in expenses} == {
        ("data", "node-0", "node-1"), ("serial", "node-0"), ("serial", "node-1"),
    }  # fmt: skip
    for one in expenses:
        price = {"node-0": 0.5, "node-1": 0.1}
        assert one["price"] == pytest.approx(one["hours"] * sum(price[node] for node in one["nodes"]))
        assert one["energy"] == pytest.approx(one["hours"] * 0.35 * len(one["nodes"]))
    assert "Expenses of a million samples" in ran.stderr


def test_changes_of_the_answer_are_shown(tmp_path: Path) -> None:
    words = ("plan", "resnet50", "--machines", "rtx3090,rtx3070", "--network", "1gbe", "--why")
    ran = evener(*words, "--strategy", "data", "--json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["plan"]["strategy"] == "serial"
    changes = {(one["varied"], one["factor"] > 1): one for one in told["changes"]}
    assert len(changes) == 6
    assert changes["links", True]["strategy"] == "data"
    assert changes["links", False]["strategy"] == "serial"
    seconds = {one["strategy"]: one["seconds"] for one in told["times"]}
    assert seconds.keys() == {"serial", "data"}
    assert sum(seconds["serial"].values()) == pytest.approx(told["plan"]["prediction"]["step_seconds"])
    assert seconds["data"]["gradients"] > seconds["serial"]["gradients"] == 0
    shown = evener_here(*words, "--strategy", "data", cwd=tmp_path)
    assert "What would change the answer" in shown.stdout + shown.stderr


def test_fast_links_favour_data_parallelism(tmp_path: Path) -> None:
    ran = evener("plan", "resnet50", "--machines", "h200-node", "--batch-size", "512", "--json", cwd=tmp_path)
    plan = json.loads(ran.stdout.splitlines()[-1])
    assert plan["strategy"] == "data"
    assert sum(a["samples"] for a in plan["assignments"]) == 512


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("resnet50",), "there is no cluster.json here"),
        (
            ("resnet50", "--machines", "h201"),
            "a machine of --machines must be a name that `evener catalogue` prints, such as h200,",
        ),
        (("resnet50", "--machines", "h200", "--strategy", "foo"), "--strategy must be one of serial, data"),
        (("resnet50", "--machines", "h200", "--precision", "foo"), "--precision must be one of"),
        (("resnet50", "--machines", "h200", "--scale", "1,2", "--why"), "--why must be without --scale"),
        (("resnet50", "--machines", "h200", "--scale", "1,2", "--watts", "9"), "--watts must be without --scale"),
        (("resnet50", "--machines", "h200", "--prices", "ada=1"), "--prices must be one of the nodes node-0"),
        (("resnet50", "--machines", "h200", "--scale", "1,2", "--agreements"), "--agreements must be without --scale"),
        (
            ("resnet50", "--machines", "h200", "--agreements", "--save", "x.json"),
            "--save must be a file that ends in .png",
        ),
        (("resnet50", "--machines", "h200", "--scale", "abc"), "--scale must be numbers of devices such as 1..1024"),
        (("resnet5", "--machines", "h200"), "there is no task 'resnet5'"),
    ],
)
def test_invalid_plan_input_gives_a_sentence(words: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    ran = evener_here("plan", *words, cwd=tmp_path)
    assert ran.returncode == 2
    assert sentence in ran.stderr
    assert "Traceback" not in ran.stderr


def test_catalogue_lists_every_name_that_plan_accepts(tmp_path: Path) -> None:
    ran = evener_here("catalogue", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    names = [line.split()[0] for line in ran.stdout.splitlines() if line.strip()]
    for name in (*ZOO, *NODES, *CARDS, *NETWORKS):
        assert name in names
    assert "layers=24 width=1024 heads=16 feed=4096 tokens=512 words=32000" in ran.stdout


def test_default_options_draw_the_default_model() -> None:
    for name in ZOO:
        assert draw(name, default_options(name)) == draw(name)


def test_all_published_settings_are_predicted(tmp_path: Path) -> None:
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
