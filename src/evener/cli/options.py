"""Options that several commands have, and what is made of their words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from evener.errors import InvalidValue

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Speeds = Annotated[
    str | None,
    typer.Option(help="Local nodes of these speeds, such as 1.0,0.5,0.25 (1.0@40=0.33: from step 40 on)."),
]
Memory = Annotated[str | None, typer.Option(help="Memory of every node, such as 4GB or 4GB,512MB.")]
Home = Annotated[Path | None, typer.Option(help="Folder of the master; $EVENER_HOME, or ~/.local/state/evener.")]
Master = Annotated[str | None, typer.Option(help="Address of the master, if it is not that of this machine's home.")]
Token = Annotated[str | None, typer.Option(help="Of that master, as `evener up` printed it.")]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the token, which `ps` does not show; or set $EVENER_TOKEN.")
]
Patience = Annotated[float, typer.Option(help="Seconds of silence after which a node is given up.")]


def home_of(home: Path | None) -> Path:
    """The folder of a master: what the user named, or the default."""
    from evener.ps.state_dir import default_state_dir

    return home or default_state_dir(os.environ)


def options_of(items: list[str] | None) -> dict[str, str]:
    """`key=value` of every item. Raises InvalidValue."""
    pairs: dict[str, str] = {}
    for item in items or []:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise InvalidValue("--option", item, "key=value")
        pairs[key] = value
    return pairs
