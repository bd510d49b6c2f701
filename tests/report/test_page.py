"""The HTML page: whole, self-contained, escaped."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from evener.records.errors import EvenerError, Interrupted, InvalidInput, InvalidValue, NodeLost
from evener.records.events import Phase
from evener.records.record import Event, TrainRecord
from evener.report.html import write_page, write_records
from evener.training.console import RunView
from support.fake_runs import NODES, fake_run
from support.refusals import refused

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """What a page holds: the text of its cells and headings, its links and images; refuses unbalanced tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.ids: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data.strip())


def page_of(records: dict[str, TrainRecord], folder: Path, title: str = "Digits") -> Page:
    write_page(folder / "page.html", records, title)
    return Page((folder / "page.html").read_text())


def test_page_compares_its_runs_and_shows_each(tmp_path: Path) -> None:
    runs = {"alone": fake_run((20,), NODES[:1], num_steps=5, events=False), "evener": fake_run(num_steps=5, seed=1)}
    page = page_of(runs, tmp_path)
    assert page.texts["h1"] == ["Digits"]
    assert page.texts["h2"] == ["alone", "evener"]
    assert page.texts["caption"][0] == "Comparison"
    assert page.tags.count("img") == 2 + 3 * 2
    assert "digits: 1 node, data, 5 epochs, fp32, seed 0" in page.texts["p"]
    for event in runs["evener"].events:
        assert event.message in page.texts["td"]
    for rejected in runs["evener"].plan.rejected:
        assert any(rejected.reason in cell for cell in page.texts["td"])
    assert page.texts["td"].count("2.11.0") == 2
    assert f"{100 * (runs['evener'].validation_accuracy or 0):.2f} %" in page.texts["dd"]


def test_page_of_one_run_has_no_comparison(tmp_path: Path) -> None:
    page = page_of({"evener": fake_run(num_steps=2)}, tmp_path)
    assert "Comparison" not in page.texts["caption"]
    assert "nav" not in page.tags
    assert page.tags.count("img") == 1 + 3


def test_page_loads_nothing_from_outside(tmp_path: Path) -> None:
    runs = {"alone": fake_run(num_steps=2), "evener": fake_run(num_steps=2)}
    page = page_of(runs, tmp_path)
    images = [source for source in page.sources if not source.startswith("#")]
    for image in images:
        drawn = base64.b64decode(image.removeprefix("data:image/svg+xml;base64,"), validate=True).decode()
        assert ElementTree.fromstring(drawn).tag.endswith("svg")
        assert "prefers-color-scheme: dark" in drawn
        assert not re.search(": #(1f2328|6b7280|e5e7eb|ffffff)", drawn.partition("</style>")[2])
    assert [source for source in page.sources if source.startswith("#")] == [f"#{one}" for one in page.ids]
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    text = (tmp_path / "page.html").read_text()
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text


def test_page_starts_with_the_summary_and_folds_details(tmp_path: Path) -> None:
    runs = {"alone": fake_run((20,), NODES[:1], num_steps=5), "evener": fake_run(num_steps=5)}
    write_page(tmp_path / "page.html", runs, "Demo", summary="It is 1.7 times as fast <so>.")
    text = (tmp_path / "page.html").read_text()
    assert text.index("It is 1.7 times as fast &lt;so&gt;.") < text.index("<table>")
    assert text.count("<details>") == 2
    write_page(tmp_path / "page.html", {"evener": runs["evener"]}, "Run")
    assert (tmp_path / "page.html").read_text().count("<details open>") == 1


def test_user_defined_names_are_escaped_in_html(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script> & \"co\""
    run = fake_run((4,), ((evil, "cpu", 1e-3),), num_steps=2)
    event = Event(step=1, kind=evil, message=evil)
    run = msgspec.structs.replace(run, task=evil, events=(event,), environment={evil: evil})
    page = page_of({evil: run}, tmp_path, title=evil)
    assert "script" not in page.tags
    assert page.texts["h1"] == page.texts["h2"] == page.texts["title"] == [evil]
    assert page.texts["td"].count(evil) >= 5


def test_run_without_steps_or_events_has_a_page(tmp_path: Path) -> None:
    page = page_of({"nothing": msgspec.structs.replace(fake_run(num_steps=0), events=())}, tmp_path)
    assert "Nothing happened." in page.texts["p"]
    assert page.texts["dd"].count("-") == 3


@pytest.mark.parametrize(
    "ending", [Interrupted("stopped as asked"), NodeLost("node b is gone"), None], ids=["stopped", "failed", "killed"]
)
def test_run_without_a_record_is_rejected_with_its_progress(ending: EvenerError | None, tmp_path: Path) -> None:
    view = RunView(tmp_path)
    view.console.quiet = True
    view(Phase(what="joining", detail="the master"))
    if ending is not None:
        view.end(ending)
    with refused(InvalidInput):
        write_records([tmp_path / "record.json"], tmp_path / "page.html")
    view.end(None)


def test_page_without_records_is_rejected_and_not_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue) as error:
        write_page(tmp_path / "page.html", {}, "Digits")
    assert (error.value.field, error.value.value) == ("records", {})
    assert os.listdir(tmp_path) == []


def test_report_imports_neither_torch_nor_matplotlib() -> None:
    modules = "evener.report.html, evener.report.tables"
    code = f"import sys, {modules}; print({{'torch', 'matplotlib', 'tensorboard'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
