"""Python's warnings during the loading of a task, shown once for all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from evener.comm.group import Group


@contextmanager
def shared_warnings(group: Group) -> Iterator[None]:
    """Show each warning of the block once for all ranks of `group`, after the block; every rank calls this.

    If the block fails on this rank, it shows its own warnings.
    """
    if group.size == 1:
        yield
        return
    shown_before: set[str] = set()
    recorded: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as recorded:
            yield
        rows = group.all_gather_bytes(msgspec.json.encode([_text(warning) for warning in recorded]))
        shown_before = {text for row in rows[: group.rank] for text in msgspec.json.decode(row, type=list[str])}
    finally:
        for warning in recorded:
            if _text(warning) not in shown_before:
                warnings.showwarning(
                    warning.message, warning.category, warning.filename, warning.lineno, warning.file, warning.line
                )


def _text(warning: warnings.WarningMessage) -> str:
    return f"{warning.category.__name__}: {warning.message}"
