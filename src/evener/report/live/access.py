"""Access to the live page: a token is required, an address of this machine, and no other page as intermediary.

The token in the address becomes a cookie and disappears from the address. Every request's Host and Origin are checked,
so that neither pages of other sites nor names that resolve to this machine get through.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import parse_qs

from evener.records.errors import InvalidInput
from evener.system.host import has_posix

ADDRESS = "127.0.0.1"
PORT = 7118
_NUM_PORTS_TRIED = 32
_HOSTS = (ADDRESS, "localhost", "[::1]")
_METHODS = ("GET", "HEAD")


class PageAnswer(NamedTuple):
    """The response to a request that does not get the page.

    Attributes:
        status: HTTP status code.
        headers: additional headers.
    """

    status: int
    headers: dict[str, str]


class Access:
    """Decides which requests get the page.

    Args:
        token: secret that opens the page.
        port: port on which the page is served.
    """

    def __init__(self, token: str, port: int) -> None:
        self._token = token.encode()
        self._hosts = {f"{host}:{port}" for host in _HOSTS}
        self._cookie = f"evener-{port}"

    def refusal(self, method: str, path: str, query: str, headers: Mapping[str, str]) -> PageAnswer | None:
        """Return the response to a request that does not get the page; None if it does.

        Args:
            method: HTTP method.
            path: path of the address.
            query: query string, without its question mark.
            headers: headers by lower-case name.
        """
        if not self._is_from_here(headers):
            return PageAnswer(403, {})
        if method in _METHODS and self._is_token(query_token := parse_qs(query).get("token", [""])[0]):
            cookie = f"{self._cookie}={query_token}; HttpOnly; SameSite=Strict; Path=/"
            return PageAnswer(303, {"location": path, "set-cookie": cookie})
        if not self._is_token(_cookies(headers.get("cookie", "")).get(self._cookie, "")):
            return PageAnswer(403, {})
        return None if method in _METHODS else PageAnswer(405, {"allow": ", ".join(_METHODS)})

    def _is_from_here(self, headers: Mapping[str, str]) -> bool:
        host, origin = headers.get("host", ""), headers.get("origin")
        is_own = headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        return host in self._hosts and origin in (None, f"http://{host}") and is_own

    def _is_token(self, candidate: str) -> bool:
        return hmac.compare_digest(candidate.encode("utf-8", "surrogateescape"), self._token)


def listen(port: int) -> socket.socket:
    """Return a socket that listens on `port` of the loopback; port 0 takes the first free one from 7118 on.

    Raises:
        InvalidInput: the port, or each of the ports tried, is taken or not allowed.
    """
    for candidate in [port] if port else range(PORT, PORT + _NUM_PORTS_TRIED):
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if has_posix():  # Windows would give a port to several sockets
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((ADDRESS, candidate))
            listening.listen()
        except (OSError, OverflowError) as error:
            listening.close()
            reason = getattr(error, "strerror", None) or str(error)
        else:
            return listening
    raise InvalidInput(f"the live page cannot be served on port {candidate} ({reason}): choose another one")


def _cookies(header: str) -> dict[str, str]:
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return {name: value for name, _, value in pairs}
