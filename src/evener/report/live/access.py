"""Who may see the live page: whoever has its token, at an address of this machine, and nobody through another page.

A token in the address becomes a cookie, and goes out of the address. Host and Origin are looked at in every request, so
that no page of another site, and no name that resolves to this machine, reaches this one.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import parse_qs

from evener.records.errors import InvalidInput

ADDRESS = "127.0.0.1"
PORT = 7118
_TRIED = 32
_HOSTS = (ADDRESS, "localhost", "[::1]")
_METHODS = ("GET", "HEAD")


class PageAnswer(NamedTuple):
    """What a request is answered with instead of the page.

    Attributes:
        status: of HTTP.
        headers: besides the usual ones.
    """

    status: int
    headers: dict[str, str]


class Access:
    """Decides about requests.

    Args:
        token: that opens the page.
        port: at which it is.
    """

    def __init__(self, token: str, port: int) -> None:
        self._token = token.encode()
        self._hosts = {f"{host}:{port}" for host in _HOSTS}
        self._cookie = f"evener-{port}"

    def refusal(self, method: str, path: str, query: str, headers: Mapping[str, str]) -> PageAnswer | None:
        """What to answer; None: the page.

        Args:
            method: of HTTP.
            path: of the address.
            query: behind its question mark.
            headers: by name in small letters.
        """
        if not self._is_from_here(headers):
            return PageAnswer(403, {})
        if method in _METHODS and self._is_token(given := parse_qs(query).get("token", [""])[0]):
            cookie = f"{self._cookie}={given}; HttpOnly; SameSite=Strict; Path=/"
            return PageAnswer(303, {"location": path, "set-cookie": cookie})
        if not self._is_token(_cookies(headers.get("cookie", "")).get(self._cookie, "")):
            return PageAnswer(403, {})
        return None if method in _METHODS else PageAnswer(405, {"allow": ", ".join(_METHODS)})

    def _is_from_here(self, headers: Mapping[str, str]) -> bool:
        host, origin = headers.get("host", ""), headers.get("origin")
        is_own = headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        return host in self._hosts and origin in (None, f"http://{host}") and is_own

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token)


def listen(port: int) -> socket.socket:
    """A socket at `port` of the loopback; with 0 at 7118, or the next one that is free.

    Raises:
        InvalidInput: the port, or all of these, are taken or not allowed.
    """
    for wanted in [port] if port else range(PORT, PORT + _TRIED):
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((ADDRESS, wanted))
            listening.listen()
        except (OSError, OverflowError) as error:
            listening.close()
            why = getattr(error, "strerror", None) or str(error)
        else:
            return listening
    raise InvalidInput(f"the live page cannot be served on port {wanted} ({why}): name another one")


def _cookies(header: str) -> dict[str, str]:
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return {name: value for name, _, value in pairs}
