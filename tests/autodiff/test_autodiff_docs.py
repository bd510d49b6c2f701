"""The examples of docs/autodiff.md run unchanged."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from evener.autodiff.rules import RULES

PAGE = Path(__file__).parents[2] / "docs" / "autodiff.md"


def test_every_code_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block whose first line names a file is one: it has what it imports, and nothing of other blocks."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 8
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    try:
        for block in blocks:
            if file := re.match(r"# (\w+)\.py", block):
                (tmp_path / f"{file[1]}.py").write_text(block)
                names |= vars(import_module(file[1]))
            else:
                exec(block, names)
    finally:
        RULES.pop("softplus", None)  # the page adds it
        for path in tmp_path.glob("*.py"):
            sys.modules.pop(path.stem, None)


def test_every_file_named_on_the_page_exists() -> None:
    root = PAGE.parents[1]
    package = root / "src" / "evener" / "autodiff"
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", PAGE.read_text()):
        assert (package / name).exists() or (root / name).exists(), name
