"""The page in a real browser: what is seen, how soon, by keyboard, in the dark, on a telephone, and with no network."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.records.event_log import EventLog
from evener.records.event_tail import EVENTS_FILE
from evener.records.events import Phase, RunEvent
from evener.records.plan import Rejected
from evener.records.record import Event, Step
from evener.records.schema import write_noun
from evener.records.search_record import STUDY_FILE
from evener.report.html import write_page
from support.fake_runs import fake_run
from support.fake_search import fake_search

pytest.importorskip("uvicorn", reason="the live page needs evener[dashboard]")
playwright = pytest.importorskip("playwright.sync_api", reason="browsers need evener[browser]")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]
PANELS = ["now", "nodes", "strip", "waits", "curves", "shares", "links", "events", "compare"]
_STEP = 0.1
REASON = (
    "1,111 samples/s measured on this device; as many samples as it computes in the time of the others; its memory "
    "would allow four times as many"
)
"""For a share, as long as those of runs."""
LEFT_OUT = Rejected(what="old-laptop", reason="the step would not be shorter with it", is_node=True)


@pytest.fixture
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of the page of what lies in `folder`."""
    command = [sys.executable, "-m", "evener", "dashboard", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http\S+", process.stdout.readline())
        assert found is not None
        try:
            yield found[0]
        finally:
            process.terminate()


def written(
    folder: Path, num_steps: int = 300, *, ring: tuple[float, float] | None = (1.2e-4, 1e-9), agreement: str = ""
) -> None:
    """A run as it could have been, every step a line."""
    folder.mkdir(exist_ok=True)
    record, seconds = fake_run(num_steps=num_steps), count(int(time.time()) - num_steps)
    log = EventLog(folder / EVENTS_FILE, pytest.fail, lambda: float(next(seconds)))
    assignments = tuple(msgspec.structs.replace(one, reason=REASON) for one in record.plan.assignments)
    plan = msgspec.structs.replace(record.plan, assignments=assignments, ring=ring, rejected=(LEFT_OUT,))
    options = {"--agreement": agreement} if agreement else {}
    events: list[RunEvent] = [Phase(what="training", num_samples=200 * num_steps, epochs=4, options=options), plan]
    for event in (*events, *record.steps, *record.validations, *record.events):
        log.add(event)
    log.close()


class Running:
    """Writes a run as if it went on, a step every tenth of a second, until it is told to end."""

    def __init__(self, folder: Path) -> None:
        self._log = EventLog(folder / EVENTS_FILE, pytest.fail)
        self._end, self._slow = threading.Event(), 1.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def slow_bob(self, factor: float) -> float:
        """Bob computes so many times longer from now on; when that is."""
        self._slow = factor
        return time.monotonic()

    def lose_bob(self) -> float:
        """Bob is gone; when that is known."""
        self._log.add(Event(step=1, kind="node lost", message="node bob was killed", nodes=("bob",)))
        return time.monotonic()

    def end(self) -> None:
        self._end.set()
        self._thread.join()
        self._log.close()

    def _run(self) -> None:
        record = fake_run(num_steps=2000)
        self._log.add(record.plan)
        for step in record.steps:
            if self._end.wait(_STEP * self._slow):
                return
            self._log.add(self._slowed(step))

    def _slowed(self, step: Step) -> Step:
        nodes = list(step.nodes)
        nodes[1] = msgspec.structs.replace(nodes[1], compute_seconds=nodes[1].compute_seconds * self._slow)
        return msgspec.structs.replace(step, nodes=tuple(nodes), seconds=step.seconds * self._slow)


@contextmanager
def running(folder: Path) -> Iterator[Running]:
    run = Running(folder)
    try:
        yield run
    finally:
        run.end()


def opened(browser: Any, address: str, shown: str = "#node-table table", **words: Any) -> Any:
    page = browser.new_page(**words)
    page.faults = []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("console", lambda message: page.faults.append(message.text) if message.type != "log" else None)
    page.goto(address)
    page.wait_for_selector(shown)
    return page


def until(page: Any, holds: Callable[[], bool]) -> None:
    """Wait for it; the page's own rules allow no evaluated text."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        page.wait_for_timeout(50)


@pytest.mark.parametrize(("scheme", "width"), [("dark", 1200), ("light", 1200), ("light", 400)])
def test_every_panel_has_content_and_requests_stay_local(tmp_path: Path, browser: Any, scheme: str, width: int) -> None:
    written(tmp_path / "run")
    asked: list[str] = []
    with served(tmp_path / "run") as address:
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        context.on("request", lambda request: asked.append(request.url))
        page = opened(context, address)
        page.wait_for_selector("#share-plot canvas")
        assert {url.split("/")[2].partition(":")[0] for url in asked} == {"127.0.0.1"}
        assert "token" not in page.url
        assert page.faults == []
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        for name in PANELS:
            assert page.locator(f"#{name}").inner_text() or page.locator(f"#{name} canvas").count()
        assert page.locator("#node-table tbody tr").count() == 4
        assert {"CPU", "memory"} <= set(page.locator("#node-table thead th").all_text_contents())
        table = page.locator("#node-table").bounding_box()
        boxes = [row.bounding_box() for row in page.locator("#node-table tbody tr").all()]
        assert max(box["height"] for box in boxes) < 80
        assert boxes[-1]["y"] + boxes[-1]["height"] <= table["y"] + table["height"]
        assert "rebalanced" in page.locator("#event-table").inner_text()
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(13, 17, 23)") == (scheme == "dark")
        context.close()


@pytest.mark.parametrize(("scheme", "width"), [("dark", 1200), ("light", 400)])
def test_page_of_several_runs_is_short_with_readable_pictures(
    tmp_path: Path, browser: Any, scheme: str, width: int
) -> None:
    runs = {name: fake_run(num_steps=60) for name in ("alone", "equal", "evener")}
    write_page(tmp_path / "demo.html", runs, "Demo", summary="It is 1.7 times as fast.")
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    page.goto((tmp_path / "demo.html").as_uri())
    assert page.evaluate("document.querySelector('img').getBoundingClientRect().width") >= 600  # which is scrolled
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.evaluate("document.documentElement.scrollHeight") < 4000
    assert page.locator("p:has-text('1.7 times')").bounding_box()["y"] < 900


def test_panels_are_reached_by_keyboard(tmp_path: Path, browser: Any) -> None:
    written(tmp_path / "run")
    with served(tmp_path / "run") as address:
        page = opened(browser, address)
        for number, name in enumerate(PANELS, 1):
            page.keyboard.press(str(number))
            assert page.evaluate("document.activeElement.id") == name
        page.keyboard.press("1")
        page.keyboard.press("Shift+Tab")
        assert page.evaluate("document.activeElement.tagName") == "A"


def test_text_of_a_run_is_shown_verbatim_without_markup(tmp_path: Path, browser: Any) -> None:
    written(tmp_path / "run", num_steps=20)
    bad = "<img src=x onerror=\"document.title='taken'\">"
    log = EventLog(tmp_path / "run" / EVENTS_FILE, pytest.fail)
    log.add(Event(step=3, kind=bad, message=bad, nodes=(bad,)))
    log.close()
    with served(tmp_path / "run") as address:
        page = opened(browser, address)
        assert bad in page.locator("#event-table").inner_text()
        assert page.locator("img").count() == 0
        assert "taken" not in page.title()


def test_slow_node_turns_red_in_three_seconds_and_a_lost_one_in_one(tmp_path: Path, browser: Any) -> None:
    with running(tmp_path) as run, served(tmp_path) as address:
        page = opened(browser, address)
        until(page, lambda: int(page.locator("#tiles dd").first.inner_text()) > 40)
        assert page.locator("#node-table .bad").count() == 0
        begin = run.slow_bob(2.5)
        page.wait_for_selector("#node-table tr.bad", timeout=20_000)
        took = time.monotonic() - begin
        assert page.locator("#node-table tr.bad").inner_text().startswith("bob")
        begin = run.lose_bob()
        page.wait_for_selector("#node-table tr.bad:has-text('lost')", timeout=20_000)
        lost = time.monotonic() - begin
    assert (took < 3.0, lost < 1.0) == (True, True), f"slow after {took:.2f} s, lost after {lost:.2f} s"


def test_another_run_can_be_selected_and_the_newest_is_followed(tmp_path: Path, browser: Any) -> None:
    written(tmp_path / "first", num_steps=30)
    with served(tmp_path) as address:
        page = opened(browser, address)
        assert page.locator("#run").inner_text() == "first"
        written(tmp_path / "second", num_steps=20)
        until(page, lambda: page.locator("#run").inner_text() == "second")
        page.select_option("#runs", "first")
        until(page, lambda: page.locator("#run").inner_text() == "first")


@pytest.mark.parametrize(("scheme", "width"), [("dark", 1280), ("dark", 400), ("light", 400)])
def test_nodes_and_routes_are_drawn_with_left_out_nodes_dashed(
    tmp_path: Path, browser: Any, scheme: str, width: int
) -> None:
    written(tmp_path / "run", num_steps=20)
    with served(tmp_path / "run") as address:
        page = opened(browser, address, color_scheme=scheme, viewport={"width": width, "height": 900})
        picture = page.locator("#route-picture svg")
        assert picture.locator(".node").count() == 4
        assert picture.locator("path.route").count() == 3
        assert "ada sends gradients to bob" in picture.get_attribute("aria-label")
        assert "left out" in picture.locator(".absent").text_content()
        assert "1.00 GB/s, delay 120 µs" in page.locator("#route-note").inner_text()
        boxes = [box.bounding_box() for box in picture.locator("rect").all()]
        assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
        assert page.faults == []


@pytest.mark.parametrize(("agreement", "contents"), [("", 1), ("average", 2), ("sync", 2)])
def test_unmeasured_links_are_drawn_and_labelled(tmp_path: Path, browser: Any, agreement: str, contents: int) -> None:
    written(tmp_path / "run", num_steps=20, ring=None, agreement=agreement)
    with served(tmp_path / "run") as address:
        page = opened(browser, address)
        routes, note = page.locator("#route-picture path.route"), page.locator("#route-note span")
        assert routes.count() == (6 if agreement else 3)
        assert note.count() == contents, note.all_inner_texts()
        assert all("not measured" in line for line in note.all_inner_texts())
        assert page.faults == []


@pytest.mark.parametrize(("scheme", "width"), [("dark", 1280), ("light", 400)])
def test_other_runs_are_compared_over_time_and_samples(tmp_path: Path, browser: Any, scheme: str, width: int) -> None:
    for name in ("first", "second", "third"):
        written(tmp_path / name, num_steps=20)
    with served(tmp_path) as address:
        page = opened(
            browser, address, "#compare-choices input", color_scheme=scheme, viewport={"width": width, "height": 900}
        )
        assert page.locator("#compare-choices input").count() == 2
        assert page.locator("#compare-table table").count() == 0
        page.locator("#compare-choices input").first.check()
        page.wait_for_selector("#compare-accuracy-plot canvas")
        until(page, lambda: page.locator("#compare-table tbody tr").count() == 2)
        assert "seconds in steps" in page.locator("#compare-loss-plot").text_content()
        page.select_option("#compare-axis", "samples")
        until(page, lambda: "samples" in page.locator("#compare-loss-plot").text_content())
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        page.locator("#compare-choices input").first.uncheck()
        until(page, lambda: page.locator("#compare-table table").count() == 0)
        assert page.faults == []


def test_title_shows_task_and_file_with_named_times(tmp_path: Path, browser: Any) -> None:
    written(tmp_path / "run", num_steps=20)
    log = EventLog(tmp_path / "run" / EVENTS_FILE, pytest.fail)
    log.add(Phase(what="training", task="mine", file="mine.py"))
    log.close()
    with served(tmp_path) as address:
        page = opened(browser, address)
        assert page.locator("#run").inner_text() == "mine (mine.py)"
        shown = page.locator("#origin").inner_text()
        assert re.fullmatch(r"run folder run · began .*\d:\d\d:\d\d · last news .*\d:\d\d:\d\d", shown)


@pytest.mark.parametrize(("scheme", "width"), [("dark", 1200), ("light", 400)])
def test_search_has_its_own_live_panels(tmp_path: Path, browser: Any, scheme: str, width: int) -> None:
    write_noun(fake_search(trials=5, is_over=False), tmp_path / STUDY_FILE)
    with served(tmp_path) as address:
        shape = {"width": width, "height": 900}
        page = opened(browser, address, "#trial-table table", color_scheme=scheme, viewport=shape)
        page.wait_for_selector("#score-plot canvas")
        assert page.locator("#trial-table tbody tr").count() == 5
        assert "goes on" in page.locator("#trial-table tbody tr").first.inner_text()
        assert [page.locator(f"#{name}").is_visible() for name in PANELS] == [True] + [False] * (len(PANELS) - 1)
        for number, name in enumerate(["now", "trials", "scores", "options"], 1):
            page.keyboard.press(str(number))
            assert page.evaluate("document.activeElement.id") == name
        write_noun(fake_search(), tmp_path / STUDY_FILE)
        until(page, lambda: page.locator("#trial-table tbody tr").count() == 12)
        assert "★" in page.locator("#trial-table tr.best").inner_text()
        assert "<b>my_task.py line 25" in page.locator("#trial-table tr.bad").first.inner_text()
        assert "The best of 12 trials: lr " in page.locator("#parallel-canvas").get_attribute("aria-label")
        assert "lr 70 %" in page.locator("#importance").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert page.faults == []
