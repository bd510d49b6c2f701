"""Ports that nobody has."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One of the loopback's, free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
