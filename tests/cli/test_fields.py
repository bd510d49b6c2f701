"""The command line is the fields of a struct: names, types, defaults and collections."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from msgspec import Meta, Struct, field
from typer.testing import CliRunner

from evener.cli.fields import command_of, pairs, with_default_port
from evener.records.errors import InvalidValue
from support.refusals import refused


class Asked(Struct, frozen=True, kw_only=True):
    """What is asked."""

    what: Annotated[str, Meta(description="An argument.")]
    kind: Annotated[Literal["a", "b"] | None, Meta(description="A choice.")] = None
    where_to: Annotated[Path, Meta(description="A path.")] = Path("here")
    often: Annotated[bool, Meta(description="A flag.")] = False
    option: Annotated[dict[str, str], Meta(description="Pairs.")] = {}
    learn: Annotated[tuple[Path, ...], Meta(description="Several.")] = ()
    hidden: float = field(default_factory=lambda: 1.0)


def ask(*words: str) -> Any:
    """What the command was called with, and its exit code."""
    calls: list[tuple[Asked, bool]] = []

    def asked(config: Asked, as_json: bool) -> None:
        """Ask."""
        calls.append((config, as_json))

    app = typer.Typer()
    app.command()(command_of(asked))
    result = CliRunner().invoke(app, list(words))
    return calls[0] if calls else result


def test_defaults_are_those_of_the_struct() -> None:
    assert ask("x") == (Asked(what="x"), False)


def test_every_field_is_an_option() -> None:
    words = "x --kind b --where-to there --often --option a=1 --option b=2 --learn p --learn q --json"
    wanted = Asked(
        what="x",
        kind="b",
        where_to=Path("there"),
        often=True,
        option={"a": "1", "b": "2"},
        learn=(Path("p"), Path("q")),
    )
    assert ask(*words.split(" ")) == (wanted, True)


def test_field_without_a_description_is_no_option() -> None:
    assert ask("x", "--hidden", "2").exit_code == 2


def test_pair_without_a_key_is_rejected() -> None:
    with refused(InvalidValue):
        pairs(["=1"])


def test_dashboard_without_a_port_takes_a_free_one() -> None:
    assert with_default_port([]) == []
    assert with_default_port(["train", "--dashboard"]) == ["train", "--dashboard=0"]
    assert with_default_port(["--dashboard", "--quiet"]) == ["--dashboard=0", "--quiet"]
    assert with_default_port(["--dashboard", "8000", "x"]) == ["--dashboard", "8000", "x"]
