"""The sentences that Evener can say, as its code has them, and those that a page quotes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_QUOTED = re.compile(r"^\| (`{1,2})(.+?) ?\1 \|", re.MULTILINE)
_FIELD = re.compile(r"\{\w*}")


def quoted(page: str) -> list[str]:
    """What stands in code in the first column of a page's tables, where `...` stands for what varies."""
    return [found[2] for found in _QUOTED.finditer((ROOT / page).read_text())]


def is_said(sentence: str) -> bool:
    """Whether some text of the code has all parts of `sentence`, one behind the other."""
    parts = [re.escape(part) for part in re.split(r"\s*\.{3,}\s*", sentence) if part]
    pattern = re.compile(r"\s*.*?".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in _texts())


@cache
def _texts() -> tuple[str, ...]:
    """Every string in the code, without the values that are put into it."""
    files = (ROOT / "src" / "evener").rglob("*.py")
    return tuple(text for file in files for text in _strings(ast.parse(file.read_text())))


def _strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _FIELD.sub("", node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value for part in node.values if isinstance(part, ast.Constant))
            yield "".join(part for part in parts if isinstance(part, str))
