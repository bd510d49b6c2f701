"""What is printed is printed as it is: sentences name extras, shapes and paths in brackets."""

from __future__ import annotations

import pytest

from evener.run.console import open_console


@pytest.mark.parametrize("sentence", ["pip install 'evener[report]'", "size [1, 8]", "[/tmp/run] is not a folder"])
def test_brackets_are_no_markup(sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    open_console(to_stderr=False).print(sentence)
    assert capsys.readouterr().out == sentence + "\n"
