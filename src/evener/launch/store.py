"""The rendezvous store of the ranks: its owner, its address, and the path of its secret to each rank.

A rank of local nodes gets the secret from the process that starts it. Under torchrun it is in $EVENER_SECRET; where
all ranks are on one machine and it is not set, the first one draws it and writes it to a file that only its user can
read. It is never in the store itself, which answers any client.
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
_stores: Any = dist  # its stores are not typed


def new_secret() -> bytes:
    """Return a new secret for the ranks of one run."""
    return secrets.token_bytes(SECRET_BYTES)


def connect_store(host: str, port: int, secret: bytes, *, patience: float) -> SignedStore:
    """Return a new connection to the store at `host`:`port`."""
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
    """Create a store in this process, at one address of the machine; return it and its port. Port 0 takes a free one.

    If `host` names this machine only on others, such as a gateway's name, the store listens at this machine's address.
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
        store = _stores.TCPStore(
            place, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )
    return SignedStore(store, secret), port


def launcher_secret(variables: Mapping[str, str]) -> tuple[bytes, Path | None]:
    """Return the secret of ranks that torchrun started, and the file that holds it, if any.

    Args:
        variables: of the environment.

    Raises:
        InvalidInput: the ranks are on several machines and $EVENER_SECRET is not set, or it is easily guessed.
    """
    require_secret(variables)
    if text := variables.get(SECRET_VARIABLE):
        return hashlib.sha256(text.encode()).digest()[:SECRET_BYTES], None
    if variables.get("WORLD_SIZE") == "1":
        return new_secret(), None
    run = f"{os.getppid()}-{variables.get('MASTER_PORT')}-{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    file = Path(tempfile.gettempdir()) / f"evener-secret-{os.geteuid()}-{run}"
    return _secret_in(file), file


def _secret_in(file: Path) -> bytes:
    """Return the secret in a file that only its user can read; the first rank creates it.

    Raises:
        InvalidInput: other users can read the file.
    """
    if not file.exists():
        draft = file.with_name(f"{file.name}-{secrets.token_hex(8)}")
        atomic_write(draft, new_secret(), private=True)
        with contextlib.suppress(FileExistsError):  # another rank was first
            os.link(draft, file)
        draft.unlink()
    status = file.stat(follow_symlinks=False)
    if status.st_uid != os.geteuid() or status.st_mode & 0o177:
        raise InvalidInput(f"{file} can be read by others: remove it, or set ${SECRET_VARIABLE}")
    return file.read_bytes()
