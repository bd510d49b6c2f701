"""What is printed is printed as it is: sentences name extras, shapes and paths in brackets."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.errors import NodeLost
from evener.event_tail import EVENTS_FILE, EventTail
from evener.events import Phase
from evener.record import Event
from evener.run.console import RunView, open_console
from support.fake_runs import fake_plan


@pytest.mark.parametrize("sentence", ["pip install 'evener[report]'", "size [1, 8]", "[/tmp/run] is not a folder"])
def test_brackets_are_no_markup(sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    open_console(to_stderr=False).print(sentence)
    assert capsys.readouterr().out == sentence + "\n"


def losing_bob(folder: Path) -> None:
    with RunView(folder) as view:
        view.console.quiet = True
        view(fake_plan())
        raise NodeLost("node bob (rank 1) was killed at step 3")


def test_a_node_that_is_lost_is_named_in_the_log_of_its_run(tmp_path: Path) -> None:
    with pytest.raises(NodeLost):
        losing_bob(tmp_path)
    [*_, lost, end] = [event for moment in EventTail(tmp_path / EVENTS_FILE).read() for event in moment.events]
    assert lost == Event(step=0, kind="node lost", message="node bob (rank 1) was killed at step 3", nodes=("bob",))
    assert end == Phase(what="failed", detail="node bob (rank 1) was killed at step 3")
