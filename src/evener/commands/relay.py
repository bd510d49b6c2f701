"""`evener relay`: pass on the connections of nodes and a master that cannot reach each other. Needs no PyTorch."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from evener.commands.terminal import print_notice, warn_of_readers
from evener.config.options import RELAY_PORT, RelayConfig, UpConfig
from evener.ps.protocol.config import Beacon, default_state_dir, reachable_address
from evener.records.atomic import atomic_write
from evener.records.bounded_file import read_bounded
from evener.records.errors import CannotWrite, InvalidInput, MissingFile, require
from evener.system.signals import interrupt_on_stop_signals
from evener.wire.identity import Address, with_port
from evener.wire.relay import MAX_CONNECTIONS, Relay
from evener.wire.relay_claim import MIN_KEY_LENGTH
from evener.wire.relay_lines import RelayLines

KEY_VARIABLE = "EVENER_RELAY_KEY"
"""Environment variable with a relay's key."""
NO_RELAY = "none"
_MAX_KEY_FILE_BYTES = 4096
_OTHER_FILES = 32


def relay(config: RelayConfig, *, as_json: bool) -> None:
    """`evener relay`: be a relay until Ctrl-C or SIGTERM.

    Raises:
        InvalidInput: the address or the key cannot be used.
    """
    address = Address.parse(config.listen or f":{RELAY_PORT}")
    file = config.key_file or default_state_dir(os.environ) / "relay-key"
    key = _own_key(file)
    with interrupt_on_stop_signals(), suppress(KeyboardInterrupt):
        asyncio.run(_relay(address, key, file, as_json=as_json))


async def _relay(address: Address, key: str, file: Path, *, as_json: bool) -> None:
    server = Relay(key, print_notice, _most_connections())
    reachable = reachable_address(await server.listen(address))
    if as_json:
        sys.stdout.write(json.dumps({"address": str(reachable), "key_file": str(file), "pid": os.getpid()}) + "\n")
    else:
        sys.stdout.write(
            f"The relay is up. On the master's machine type:\n\n    evener up --relay {reachable}\n\n"
            f"and give it this key in ${KEY_VARIABLE}, or with --relay-key-file (here: {file}):\n\n    {key}\n\n"
            "The master then prints what to type on the nodes. If this machine has another address outside of its\n"
            "network, type that one on the master and on the nodes.\n"
        )
    sys.stdout.flush()
    await server.serve()


def _most_connections() -> int:
    """Return the number of connections for which this process may open files."""
    try:
        import resource
    except ImportError:  # on Windows, where sockets are no files
        return MAX_CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(2, min(MAX_CONNECTIONS, files - _OTHER_FILES))


def _own_key(file: Path) -> str:
    """Return the key in `file`; make one if there is no such file."""
    if not file.exists():
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            atomic_write(file, secrets.token_urlsafe(24).encode() + b"\n", private=True)
        except OSError as error:
            raise CannotWrite(file, error, "; name another file by --key-file") from error
    return _read_key(file, "--key-file")


def _read_key(file: Path, option: str) -> str:
    """Return the key in `file`. Raises MissingFile, InvalidInput."""
    warn_of_readers(file)
    try:
        text = read_bounded(file, _MAX_KEY_FILE_BYTES).decode(errors="replace")
    except OSError as error:
        raise MissingFile(f"cannot read {option} {file}: {error.strerror}") from error
    return _checked(text.strip(), f"the key in {file}")


def _checked(key: str, what: str) -> str:
    if len(key) < MIN_KEY_LENGTH:
        raise InvalidInput(f"{what} has {len(key)} characters, and a relay's key at least {MIN_KEY_LENGTH}")
    return key


def relay_of(config: UpConfig, last: Beacon | None, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return address and key of the relay of a master, from its options or the last start; empty without a relay.

    Raises:
        InvalidInput: there is no key, or it cannot be one.
        MissingFile: the file of the key cannot be read.
    """
    address = config.relay or (last.relay if last else "")
    if not address or address == NO_RELAY:
        return "", ""
    address = with_port(address, RELAY_PORT)
    if config.insecure:
        raise InvalidInput(
            f"--insecure: the relay at {address} could read and change everything; leave --insecure out, or type "
            f"--relay {NO_RELAY}"
        )
    where = Address.parse(address)
    require(not where.path and not where.is_everywhere, "--relay", address, "HOST:PORT")
    if config.relay_key_file is not None:
        return address, _read_key(config.relay_key_file, "--relay-key-file")
    if key := environment.get(KEY_VARIABLE, "").strip():
        return address, _checked(key, f"${KEY_VARIABLE}")
    if last is not None and last.relay == address:
        return address, last.relay_key
    if sys.stdin.isatty():
        return address, _checked(getpass.getpass("key of the relay, as `evener relay` shows it: ").strip(), "the key")
    raise InvalidInput(f"the relay's key is missing: give --relay-key-file FILE or ${KEY_VARIABLE}")


def lines_of(address: str, key: str, patience: float) -> RelayLines:
    """Return a master's connections to a relay, which are not open yet."""
    return RelayLines(Address.parse(address), key, patience, print_notice)
