"""The environment variables that torchrun sets for a rank, checked before PyTorch is loaded."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from evener.records.errors import InvalidInput, InvalidValue

SECRET_VARIABLE = "EVENER_SECRET"
_MIN_CHARACTERS = 16
_MAX_RANKS = 100_000


def is_rank(variables: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as one rank of several."""
    return "RANK" in variables and "WORLD_SIZE" in variables


def require_rank_variables(variables: Mapping[str, str]) -> None:
    """Check the variables of a rank.

    Raises:
        InvalidValue: one is missing, not a number, or out of range.
        InvalidInput: this system has no POSIX, or the address of the first machine cannot be resolved.
    """
    from evener.system.host import require_posix  # loaded here: it takes 10 ms, and most commands are no ranks

    require_posix("a rank that torchrun or another launcher starts")
    size = number_of(variables, "WORLD_SIZE", 1, _MAX_RANKS)
    number_of(variables, "RANK", 0, size - 1)
    number_of(variables, "LOCAL_RANK", 0, size - 1)
    number_of(variables, "MASTER_PORT", 1, 65535)
    host = variables.get("MASTER_ADDR", "")
    if not host:
        raise InvalidValue("environment variable MASTER_ADDR", host, "the address of the first machine")
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no name"
        raise InvalidInput(
            f"$MASTER_ADDR is {host}, an address that cannot be resolved here ({why}): give the first machine's IP "
            "address, such as --master-addr 192.168.1.10"
        ) from error


def number_of(variables: Mapping[str, str], name: str, least: int = 0, most: int = 2**31) -> int:
    """Return the number in a variable. Raises InvalidValue if it is missing or not from `least` to `most`."""
    text = variables.get(name)
    field = f"environment variable {name}"
    if text is None:
        raise InvalidValue(field, text, "set, as torchrun and srun do")
    if not re.fullmatch("-?[0-9]{1,18}", text):  # int() also takes other scripts' digits, spaces and underscores
        raise InvalidValue(field, text, "a whole number, as torchrun sets it")
    value = int(text)
    if not least <= value <= most:
        raise InvalidValue(field, text, f"a number from {least} to {most}")
    return value


def require_secret(variables: Mapping[str, str]) -> None:
    """Raise InvalidInput if ranks on several machines have no secret, or a secret is too short."""
    secret = variables.get(SECRET_VARIABLE)
    if secret and len(secret) < _MIN_CHARACTERS:
        raise InvalidInput(f"${SECRET_VARIABLE} must have {_MIN_CHARACTERS} characters or more, got {len(secret)}")
    is_here = variables.get("WORLD_SIZE") in ("1", variables.get("LOCAL_WORLD_SIZE"))
    if not secret and not is_here:
        raise InvalidInput(
            f"ranks on several machines need a secret: set ${SECRET_VARIABLE} to the same value on all of them, "
            "such as what `openssl rand -hex 16` prints"
        )
