"""Addresses as people write them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.errors import InvalidValue
from evener.wire.address import Address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.5:7000", Address("10.0.0.5", 7000)),
        (" gpu-box.lab:7000\n", Address("gpu-box.lab", 7000)),
        ("[::1]:7000", Address("::1", 7000)),
        ("[fe80::1%eth0]:65535", Address("fe80::1%eth0", 65535)),
        (":0", Address("", 0)),
        ("unix:/run/evener.sock", Address(path="/run/evener.sock")),
        ("unix:relative", Address(path="relative")),
    ],
)
def test_literal_addresses(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert str(address) == text.strip()


@pytest.mark.parametrize(
    "text",
    ["", "gpu-box", "gpu-box:", "7000", "::1:7000", "[::1]", "a b:7000", "host:70000", "host:-1", "unix:", "tcp://a:1"],
)
def test_what_is_no_address_is_refused_with_the_three_forms(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"HOST:PORT, \[IPV6\]:PORT or unix:PATH"):
        Address.parse(text)


def test_a_path_longer_than_a_unix_socket_may_have_is_refused() -> None:
    with pytest.raises(InvalidValue, match="a path of at most 103 bytes"):
        Address.parse("unix:/" + "ä" * 52)


@settings(deadline=None)
@given(st.from_regex(r"[a-z0-9.-]{1,30}", fullmatch=True), st.integers(0, 65535))
def test_text_and_address_are_the_same_thing(host: str, port: int) -> None:
    assert Address.parse(str(Address(host, port))) == Address(host, port)


def test_an_address_reads_well_in_a_sentence() -> None:
    assert Address("gpu-box", 7000).words == "gpu-box, port 7000"
    assert Address("", 7000).words == "all interfaces, port 7000"
    assert Address(path="/run/e").words == "unix socket /run/e"
