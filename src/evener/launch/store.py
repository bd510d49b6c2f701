"""The store where the ranks of a run find each other: who keeps it and where, and how its secret comes to each rank.

A rank of local nodes gets the secret from the process that starts it. Under torchrun it is in $EVENER_SECRET; where
all ranks are on one machine and nobody has set that, the first one draws it and leaves it in a file that only its user
can read. It never lies in the store itself, which answers everybody.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from evener.comm.signed_store import SignedStore
from evener.launch.rank_variables import SECRET_VARIABLE, require_secret
from evener.records.atomic import atomic_write
from evener.records.errors import InvalidInput, NodeLost
from evener.system.host import own_address
from evener.wire.identity import SECRET_BYTES

LEAST_START_SECONDS = 30.0
_stores: Any = dist  # whose stores are not typed


def new_secret() -> bytes:
    """For the ranks of one run."""
    return secrets.token_bytes(SECRET_BYTES)


def connect_store(host: str, port: int, secret: bytes, *, patience: float) -> SignedStore:
    """A new connection to the store at `host`:`port`."""
    seconds = max(patience, LEAST_START_SECONDS)
    try:
        store = _stores.TCPStore(host, port, timeout=timedelta(seconds=seconds), wait_for_workers=False)
    except dist.DistError as error:
        raise NodeLost(
            f"the first machine did not answer at {host}, port {port}, within {seconds:g} s: is its line started, and "
            "does its firewall let this machine pass?"
        ) from error
    return SignedStore(store, secret)


def keep_store(host: str, port: int, secret: bytes) -> tuple[SignedStore, int]:
    """A store that this process keeps, at this one address of the machine, and its port; 0 asks for a free one.

    Where `host` stands for this machine only on others, such as a gateway's name, it is kept at this one's own address.
    """
    try:
        listener = socket.create_server((host, port))
    except OSError:
        try:
            listener = socket.create_server((own_address(), port))
        except OSError as error:
            raise InvalidInput(
                f"cannot listen at port {port} for the other ranks: {error.strerror}; take another --master-port"
            ) from error
    with listener:
        place, port = listener.getsockname()[:2]
        kept = _stores.TCPStore(
            place, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )
    return SignedStore(kept, secret), port


def launcher_secret(variables: Mapping[str, str]) -> tuple[bytes, Path | None]:
    """The secret that ranks share which torchrun has started; and the file it lies in, if it lies in one.

    Args:
        variables: of the environment.

    Raises:
        InvalidInput: the ranks are on several machines and $EVENER_SECRET is not set, or it is easily guessed.
    """
    require_secret(variables)
    if given := variables.get(SECRET_VARIABLE):
        return hashlib.sha256(given.encode()).digest()[:SECRET_BYTES], None
    if variables.get("WORLD_SIZE") == "1":
        return new_secret(), None
    run = f"{os.getppid()}-{variables.get('MASTER_PORT')}-{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    file = Path(tempfile.gettempdir()) / f"evener-secret-{os.geteuid()}-{run}"
    return _secret_in(file), file


def _secret_in(file: Path) -> bytes:
    """What lies in a file that only its user can read; who comes first, draws it.

    Raises:
        InvalidInput: the file is not of this user alone.
    """
    if not file.exists():
        own = file.with_name(f"{file.name}-{secrets.token_hex(8)}")
        atomic_write(own, new_secret(), private=True)
        with contextlib.suppress(FileExistsError):  # another rank was sooner
            os.link(own, file)
        own.unlink()
    found = file.stat(follow_symlinks=False)
    if found.st_uid != os.geteuid() or found.st_mode & 0o177:
        raise InvalidInput(f"{file} can be read by others: remove it, or set ${SECRET_VARIABLE}")
    return file.read_bytes()
