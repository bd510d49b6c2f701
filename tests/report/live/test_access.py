"""The page opens for its token alone: whatever else a request says, it is refused."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.records.errors import InvalidInput
from evener.report.live.access import PORT, Access, listen

TOKEN = "k" * 43
OWN = {"host": "127.0.0.1:7118"}
COOKIE = {**OWN, "cookie": f"other=1; evener-7118={TOKEN}"}


def status(method: str = "GET", query: str = "", headers: dict[str, str] = COOKIE) -> int:
    """200 where the page is shown."""
    answer = Access(TOKEN, 7118).refusal(method, "/", query, headers)
    return 200 if answer is None else answer.status


def test_token_in_the_address_becomes_a_cookie_and_is_removed() -> None:
    answer = Access(TOKEN, 7118).refusal("GET", "/", f"token={TOKEN}", OWN)
    assert answer is not None
    assert answer.status == 303
    assert answer.headers == {
        "location": "/",
        "set-cookie": f"evener-7118={TOKEN}; HttpOnly; SameSite=Strict; Path=/",
    }


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        (COOKIE, 200),
        ({**COOKIE, "host": "localhost:7118"}, 200),
        ({**COOKIE, "origin": "http://127.0.0.1:7118", "sec-fetch-site": "same-origin"}, 200),
        ({**COOKIE, "host": "evil.example:7118"}, 403),
        ({**COOKIE, "host": "127.0.0.1:80"}, 403),
        ({"cookie": COOKIE["cookie"]}, 403),
        ({**COOKIE, "origin": "http://evil.example"}, 403),
        ({**COOKIE, "origin": "null"}, 403),
        ({**COOKIE, "origin": "https://127.0.0.1:7118"}, 403),
        ({**COOKIE, "sec-fetch-site": "cross-site"}, 403),
        ({**OWN, "cookie": f"evener-7119={TOKEN}"}, 403),
        ({**OWN, "cookie": f"evener-7118={TOKEN[:-1]}"}, 403),
        (OWN, 403),
    ],
)
def test_page_opens_only_with_the_token_on_this_machine(headers: dict[str, str], wanted: int) -> None:
    assert status(headers=headers) == wanted


def test_page_allows_only_reading() -> None:
    assert [status(method) for method in ("GET", "HEAD", "POST", "DELETE", "PUT")] == [200, 200, 405, 405, 405]
    assert status("POST", f"token={TOKEN}", OWN) == 403


@given(
    method=st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "X"]),
    query=st.text(max_size=60),
    headers=st.dictionaries(
        st.sampled_from(["host", "origin", "cookie", "sec-fetch-site", "authorization"]),
        st.one_of(st.text(max_size=60), st.sampled_from(["127.0.0.1:7118", "evener-7118=", "evener-7118=\xff"])),
    ),
)
def test_requests_without_the_token_reveal_nothing(method: str, query: str, headers: dict[str, str]) -> None:
    assert status(method, query, headers) == 403


def test_default_port_is_the_next_free_one() -> None:
    with listen(0) as first, listen(0) as second:
        ports = [one.getsockname()[1] for one in (first, second)]
        assert PORT <= ports[0] < ports[1]
        assert first.getsockname()[0] == "127.0.0.1"


def test_occupied_port_is_rejected() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InvalidInput):
            listen(taken.getsockname()[1])
