"""The token with which a master is reached: where the user gave it, and whether it says what the user means."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evener.errors import InvalidInput, MissingFile
from evener.wire.identity import Token

TOKEN_VARIABLE = "EVENER_TOKEN"
"""Environment variable with a token: unlike an option, it is not shown to everybody on the machine by `ps`."""


def given_token(token: str | None, token_file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The token that the user gave in one of three ways; None if in none.

    Args:
        token: as an option.
        token_file: that holds it.
        environment: may hold it as $EVENER_TOKEN, which the other two come before.

    Raises:
        InvalidInput: both options are given.
        MissingFile: the file cannot be read.
    """
    if token is not None and token_file is not None:
        raise InvalidInput("--token and --token-file say the same: leave one of them out")
    if token_file is None:
        return token or environment.get(TOKEN_VARIABLE) or None
    try:
        return token_file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise MissingFile(f"cannot read --token-file {token_file}: {error.strerror}") from error


def check_security(token: Token, insecure: bool) -> None:
    """Refuse what the user and the token disagree about. Raises InvalidInput."""
    if insecure and not token.insecure:
        raise InvalidInput("--insecure: this token is of a master that encrypts; leave --insecure out")
    if token.insecure and not insecure:
        raise InvalidInput("this token is of a master without encryption: add --insecure if that is what you want")
