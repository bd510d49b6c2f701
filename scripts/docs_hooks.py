"""Pages of the documentation that are made of the code: the command line's reference, the readme as the front page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer
from typer.cli import get_docs_for_click

from evener.cli.app import app_of

ROOT = Path(__file__).parents[1]
COMMANDS = "<!-- commands -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with every page before it is rendered."""
    if page.file.src_uri == "index.md":
        return _readme()
    return markdown.replace(COMMANDS, _commands()) if COMMANDS in markdown else markdown


def _readme() -> str:
    """The readme, its links turned to the pages of the site; of what the site does not hold, the name alone."""
    return re.sub(r"\[([^\]]+)\]\(([^)]+)\)", _link, (ROOT / "README.md").read_text())


def _link(found: re.Match[str]) -> str:
    name, target = found.groups()
    if target.startswith(("http", "#")):
        return found[0]
    return f"[{name}]({target.removeprefix('docs/')})" if target.startswith("docs/") else name


def _commands() -> str:
    command = typer.main.get_command(app_of())
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="evener")
    return text.partition("\n")[2]
