"""From the fields of a struct to the options of a command: names, help, types and defaults are written there, once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import typer
from msgspec import Struct
from msgspec.structs import FieldInfo, fields

from evener.cli.help import Panels
from evener.config.conflicts import option_name
from evener.config.option_values import choices_of, description_of, kind_of, require_moderate
from evener.records.errors import require

_Words = Annotated[list[str] | None, typer.Argument(help="Words for the program itself.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Usual: TypeAlias = Callable[[Mapping[str, Any], set[str]], AbstractContextManager[dict[str, Any]]]
"""Of values by field, and the fields that were typed: with what a file says in place of defaults, inside of a block."""
_ARGUMENTS = ("address",)
"""Fields with a default that are arguments all the same."""


def command_of(
    run: Callable[..., None], panels: Panels | None = None, usual: Usual | None = None
) -> Callable[..., None]:
    """The function of a command whose options are the fields of a struct, and `--json` if `run` takes `as_json`.

    Fields without a default are arguments, those without a description are left out; if there is a field `arguments`,
    it has the words that are no options, in order.

    Args:
        run: what the command does, with the struct, which is its first parameter; gives the name and the help.
        panels: in which the options are shown.
        usual: what is taken where nothing was typed.
    """
    kind: type[Struct] = next(iter(get_type_hints(run).values()))
    shown = [one for one in fields(kind) if description_of(one)]
    has_arguments = any(one.name == "arguments" for one in fields(kind))

    def command(context: typer.Context, **parsed: Any) -> None:
        others = {"arguments": tuple(parsed.pop("arguments") or ())} if has_arguments else {}
        values = {one.name: _value(one, parsed.pop(one.name)) for one in shown} | others
        for name, value in values.items():
            require_moderate(option_name(name), value)
        with nullcontext(values) if usual is None else usual(values, _typed(context, values)) as complete:
            run(kind(**complete), **parsed)

    heading = {name: title for title, names in (panels or {}).items() for name in names}
    parameters = [_keyword("context", inspect.Parameter.empty, typer.Context)]
    parameters += [_parameter(one, heading.get(one.name), is_deniable=usual is not None) for one in shown]
    if has_arguments:
        parameters.append(_keyword("arguments", None, _Words))
    if "as_json" in inspect.signature(run).parameters:
        parameters.append(_keyword("as_json", False, Json))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    return command


def _typed(context: typer.Context, values: Mapping[str, Any]) -> set[str]:
    """The fields that stood on the command line, whatever their value."""
    sources = {name: context.get_parameter_source(name) for name in values}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameter(one: FieldInfo, panel: str | None, *, is_deniable: bool) -> inspect.Parameter:
    default = inspect.Parameter.empty if one.required else None if _is_collection(one) else one.default
    return _keyword(one.name, default, Annotated[_type(one), _option(one, panel, is_deniable=is_deniable)])


def _option(one: FieldInfo, panel: str | None, *, is_deniable: bool) -> Any:
    """The option, or the argument, that a field is; a flag that a file may set can be denied, too."""
    if one.required or one.name in _ARGUMENTS:
        return typer.Argument(help=description_of(one))
    name = one.name.replace("_", "-")
    can_be_denied = kind_of(one) is bool and (one.default is not False or is_deniable)
    declaration = f"--{name}/--no-{name}" if can_be_denied else f"--{name}"
    choices = choices_of(one)
    complete = (lambda: list(choices)) if choices else None
    return typer.Option(declaration, help=description_of(one), rich_help_panel=panel, autocompletion=complete)


def _type(one: FieldInfo) -> Any:
    """Return the type to parse: str for a choice, which the struct itself checks; a list of str for a collection."""
    if _is_collection(one):
        return list[str] | None
    word: Any = str if get_origin(kind_of(one)) is Literal else kind_of(one)
    return word | None if one.default is None else word


def _is_collection(one: FieldInfo) -> bool:
    return get_origin(kind_of(one)) in (dict, tuple)


def _value(one: FieldInfo, parsed: Any) -> Any:
    """Return the value of a field from what the command line parsed."""
    if not _is_collection(one):
        return parsed
    if get_origin(kind_of(one)) is dict:
        return pairs(parsed)
    item, _ = get_args(kind_of(one))
    return tuple(parsed or ()) if get_origin(item) is Literal else tuple(item(text) for text in parsed or ())


def with_default_port(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line with port 0, the next free one, for each `--dashboard` without a port."""
    return [
        "--dashboard=0" if argument == "--dashboard" and not after.isdecimal() else argument
        for argument, after in zip_longest(arguments, arguments[1:], fillvalue="")
    ]


def pairs(items: Sequence[str] | None) -> dict[str, str]:
    """`key=value` of every item. Raises InvalidValue."""
    values: dict[str, str] = {}
    for item in items or ():
        key, separator, value = item.partition("=")
        require(bool(separator and key), "--option", item, "key=value")
        values[key] = value
    return values
