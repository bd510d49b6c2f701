"""From the fields of a struct to the options of a command: names, help, types and defaults are written there, once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import zip_longest
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from msgspec import Meta, Struct
from msgspec.structs import FieldInfo, fields

from evener.cli.help import Panels
from evener.errors import require

_Words = Annotated[list[str] | None, typer.Argument(help="Words for the program itself.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]


def command_of(kind: type[Struct], run: Callable[..., None], panels: Panels | None = None) -> Callable[..., None]:
    """The function of a command whose options are the fields of `kind`, and `--json` if `run` takes `as_json`.

    If `kind` has `arguments`, they are the words that are no options of it, in order.

    Args:
        kind: fields without a default are arguments, those without a description are left out.
        run: what the command does, with the struct; gives the name and the help.
        panels: in which the options are shown.
    """
    shown = [one for one in fields(kind) if _description(one)]

    has_arguments = any(one.name == "arguments" for one in fields(kind))

    def command(**words: Any) -> None:
        others = {"arguments": tuple(words.pop("arguments") or ())} if has_arguments else {}
        config = kind(**{one.name: _value(one, words.pop(one.name)) for one in shown}, **others)
        run(config, **words)

    heading = {name: title for title, names in (panels or {}).items() for name in names}
    parameters = [_parameter(one, heading.get(one.name)) for one in shown]
    if has_arguments:
        parameters.append(
            inspect.Parameter("arguments", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_Words)
        )
    if "as_json" in inspect.signature(run).parameters:
        parameters.append(inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    return command


def _parameter(one: FieldInfo, panel: str | None) -> inspect.Parameter:
    annotation: Any = Annotated[_type(one), _option(one, panel)]
    default = inspect.Parameter.empty if one.required else None if _is_collection(one) else one.default
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option(one: FieldInfo, panel: str | None) -> Any:
    """The option, or the argument, that a field is."""
    if one.required:
        return typer.Argument(help=_description(one))
    name = one.name.replace("_", "-")
    can_be_denied = one.default is True or (one.default is None and _type(one) == bool | None)
    words = f"--{name}/--no-{name}" if can_be_denied else f"--{name}"
    return typer.Option(words, help=_description(one), rich_help_panel=panel)


def _type(one: FieldInfo) -> Any:
    """What the command line reads: a choice is a word, which the struct itself judges; a collection, words."""
    inner = get_args(one.type)[0]
    is_optional = get_origin(inner) in (Union, UnionType)
    kind = next(part for part in get_args(inner) if part is not NoneType) if is_optional else inner
    if _is_collection(one):
        return list[str] | None
    word: Any = str if get_origin(kind) is Literal else kind
    return word | None if is_optional else word


def _is_collection(one: FieldInfo) -> bool:
    return get_origin(get_args(one.type)[0]) in (dict, tuple)


def _value(one: FieldInfo, words: Any) -> Any:
    """The value of a field, of what the command line read."""
    if not _is_collection(one):
        return words
    if get_origin(get_args(one.type)[0]) is dict:
        return pairs(words)
    item, _ = get_args(get_args(one.type)[0])
    return tuple(words or ()) if get_origin(item) is Literal else tuple(item(word) for word in words or ())


def _description(one: FieldInfo) -> str:
    """Empty for a field that is no option."""
    notes = get_args(one.type)[1:] if get_origin(one.type) is Annotated else ()
    return next((note.description or "" for note in notes if isinstance(note, Meta)), "")


def with_default_port(words: Sequence[str]) -> list[str]:
    """`words` of a command line, with port 0, the next free one, behind each `--dashboard` that names none."""
    found: list[str] = []
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        found.append("--dashboard=0" if word == "--dashboard" and not after.isdecimal() else word)
    return found


def pairs(items: Sequence[str] | None) -> dict[str, str]:
    """`key=value` of every item. Raises InvalidValue."""
    found: dict[str, str] = {}
    for item in items or ():
        key, separator, value = item.partition("=")
        require(bool(separator and key), "--option", item, "key=value")
        found[key] = value
    return found
