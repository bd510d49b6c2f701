"""Where a master is reached: a TCP port or a Unix socket, as people write it."""

from __future__ import annotations

import re

import msgspec

from evener.errors import InvalidValue, require

_HOST_AND_PORT = re.compile(r"^(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<plain>[^\[\]:/\s]*)):(?P<port>[0-9]{1,5})$")
_LONGEST_PATH = 103
"""Bytes of a Unix socket's path that every system takes (Linux 107, macOS 103)."""
_ALLOWED = "HOST:PORT, [IPV6]:PORT or unix:PATH"


class Address(msgspec.Struct, frozen=True):
    """A TCP port or a Unix socket; `str()` of it is what `parse` reads.

    Attributes:
        host: name or IP address; empty for all interfaces (listening) and for Unix sockets.
        port: 0 asks the system for a free one when listening.
        path: of a Unix socket, or empty.
    """

    host: str = ""
    port: int = 0
    path: str = ""

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, "port", self.port, "between 0 and 65535")
        length = len(self.path.encode(errors="surrogateescape"))
        require(length <= _LONGEST_PATH, "address", str(self), f"unix: and a path of at most {_LONGEST_PATH} bytes")

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address in `text`: `10.0.0.5:7000`, `gpu-box:7000`, `[::1]:7000`, `:0` or `unix:/run/evener.sock`.

        Raises:
            InvalidValue: it is none of these.
        """
        text = text.strip()
        if text.startswith("unix:") and len(text) > len("unix:"):
            return cls(path=text.removeprefix("unix:"))
        match = _HOST_AND_PORT.match(text)
        if match is None or int(match["port"]) > 65535:
            raise InvalidValue("address", text, _ALLOWED)
        return cls(host=match["bracketed"] or match["plain"] or "", port=int(match["port"]))

    @property
    def words(self) -> str:
        """The address in a sentence: `gpu-box, port 7000`."""
        return f"unix socket {self.path}" if self.path else f"{self.host or 'all interfaces'}, port {self.port}"

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
