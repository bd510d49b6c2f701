"""The examples of docs/autodiff.md run unchanged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from evener.autodiff.rules import RULES

PAGE = Path(__file__).parents[2] / "docs" / "autodiff.md"


def test_every_code_block_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 7
    names: dict[str, Any] = {}
    try:
        for block in blocks:
            exec(block, names)
    finally:
        RULES.pop("softplus", None)  # the page adds it


def test_every_file_named_on_the_page_exists() -> None:
    root = PAGE.parents[1]
    package = root / "src" / "evener" / "autodiff"
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", PAGE.read_text()):
        assert (package / name).exists() or (root / name).exists(), name
