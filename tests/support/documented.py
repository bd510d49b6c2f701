"""The lines that README and docs tell people to type, and the files that they tell them to write."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
_LINE = re.compile(r"^ {4}(evener [^\n]*(?:\\\n[^\n]*)*)", re.MULTILINE)
_OPTIONAL = re.compile(r" \[[^]]*]")
_REMARK = re.compile(r"\s+#.*|\s{2,}.*")


def documented_commands() -> list[str]:
    """Every `evener ...` that stands in a block of commands, without remarks and what may be left out, once."""
    return list(dict.fromkeys(command for page in PAGES for command in _commands(page.read_text())))


def _commands(text: str) -> Iterator[str]:
    for line in _LINE.findall(text):
        plain = _OPTIONAL.sub("", line.replace("\\\n", " "))
        for part in plain.split(" && "):
            words = _REMARK.sub("", part).strip()
            if "..." not in words:
                yield words


def documented_file(page: str, name: str) -> str:
    """The file `name` as `page` has it."""
    found = re.search(rf"```python\n(# {re.escape(name)}\n.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert found is not None
    return found[1]
