"""Addresses at which ranks reach each other, as they publish them in their store."""

from __future__ import annotations

import socket

from evener.comm.signed_store import SignedStore
from evener.records.errors import NodeLost
from evener.records.schema import shown

_MAX_PORT = 65535


def publish_endpoint(store: SignedStore, key: str, host: str, server: socket.socket) -> None:
    """Publish under `key` that this machine's `server` is reached at `host`."""
    store.set(key, f"{host} {server.getsockname()[1]}")


def endpoint_of(store: SignedStore, key: str, node: str) -> tuple[str, int]:
    """Return host and port that `node` has published under `key`, once it has.

    Raises:
        NodeLost: it published something else, as another version may, or the wait is over.
    """
    text = store.get(key).decode(errors="replace")
    host, _, port = text.partition(" ")
    is_port = port.isascii() and port.isdigit() and 0 < int(port[:6]) <= _MAX_PORT
    if not is_port or host.split() != [host]:
        raise NodeLost(
            f"node {node} has published '{shown(text)}' as the address at which it is reached: host and port are "
            "expected; install the same version of Evener on all nodes",
            (node,),
        )
    return host, int(port)
