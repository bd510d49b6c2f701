"""Addresses as people write them, tokens that are mistyped nowhere unnoticed, an identity that keeps its secret."""

import hashlib
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.records.errors import InvalidFile, InvalidValue, MissingExtra, MissingFile
from evener.wire.errors import BadToken
from evener.wire.identity import Address, Identity, Token, host_in, make_identity, with_port
from support.refusals import refused
from support.wire_peers import INSECURE, SECURE

secrets = st.binary(min_size=16, max_size=16)
fingerprints = st.none() | st.binary(min_size=32, max_size=32)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
TOKEN = Token(secret=bytes(range(16)), fingerprint=bytes(range(100, 132)))


def test_token_has_the_documented_text() -> None:
    token = Token(secret=bytes(16), fingerprint=None)
    assert token.text == "evener1-AAAAAAAAAAAAAAAAAAAAAGVMPhQ"
    assert token.insecure
    assert not TOKEN.insecure


@settings(deadline=None)
@given(secrets, fingerprints)
def test_token_survives_a_round_trip_through_text(secret: bytes, fingerprint: bytes | None) -> None:
    token = Token(secret=secret, fingerprint=fingerprint)
    assert Token.parse(token.text) == token
    assert len(token.text) == (35 if fingerprint is None else 78)


@settings(deadline=None)
@given(secrets, fingerprints, st.data())
def test_one_wrong_character_in_a_token_is_detected(
    secret: bytes, fingerprint: bytes | None, data: st.DataObject
) -> None:
    text = Token(secret=secret, fingerprint=fingerprint).text
    place = data.draw(st.integers(0, len(text) - 1))
    wrong = data.draw(st.sampled_from(LETTERS + " .é").filter(lambda letter: letter != text[place]))
    with pytest.raises(BadToken, match="copy the whole token"):
        Token.parse(text[:place] + wrong + text[place + 1 :])


def test_wrong_last_character_of_a_token_is_detected() -> None:
    text = TOKEN.text
    for wrong in set(LETTERS) - {text[-1]}:
        with pytest.raises(BadToken):
            Token.parse(text[:-1] + wrong)


@settings(deadline=None)
@given(secrets, fingerprints, st.data())
def test_truncated_token_is_detected(secret: bytes, fingerprint: bytes | None, data: st.DataObject) -> None:
    text = Token(secret=secret, fingerprint=fingerprint).text
    with pytest.raises(BadToken):
        Token.parse(text[: data.draw(st.integers(0, len(text) - 1))])


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "begins with evener1-, and nothing was given"),
        ("evener2-AAAA", "begins with evener1-, and what was given does not; copy"),
        (TOKEN.text + "AAAA", "35 or 78 characters, got 82"),
        (TOKEN.text[:-5] + "AAAAA", "mistyped: its last characters"),
        ("evener1-****", "characters or a length that no token has"),
    ],
)
def test_bad_token_message_names_the_broken_rule(text: str, rule: str) -> None:
    with pytest.raises(BadToken, match=rule):
        Token.parse(text)


def test_whitespace_in_a_token_is_ignored() -> None:
    text = TOKEN.text
    assert Token.parse(f"  {text[:30]}\r\n  {text[30:]}\n") == TOKEN


def test_printed_token_hides_its_secret() -> None:
    assert repr(TOKEN) == str(TOKEN) == "Token(6465666768696a6b, secret hidden)"


@pytest.mark.parametrize(("secret", "fingerprint"), [(b"", None), (bytes(17), None), (bytes(16), b"short")])
def test_secrets_and_fingerprints_have_one_length(secret: bytes, fingerprint: bytes | None) -> None:
    with refused(InvalidValue):
        Token(secret=secret, fingerprint=fingerprint)


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
def test_address_is_parsed_and_printed(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert str(address) == text.strip()


@pytest.mark.parametrize(
    "text",
    ["", "gpu-box", "gpu-box:", "7000", "::1:7000", "[::1]", "a b:7000", "host:70000", "host:-1", "unix:", "tcp://a:1"],
)
def test_invalid_address_is_rejected_with_the_three_forms(text: str) -> None:
    with refused(InvalidValue):
        Address.parse(text)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("gpu-box", "gpu-box:7117"),
        ("192.168.1.10", "192.168.1.10:7117"),
        ("[fe80::1%eth0]", "[fe80::1%eth0]:7117"),
        ("gpu-box:7000", "gpu-box:7000"),
        ("a, b:1,unix:/run/evener.sock", "a:7117, b:1,unix:/run/evener.sock"),
        ("7000", "7000"),
        ("", ""),
        ("fe80::1", "fe80::1"),
        ("tcp://a", "tcp://a"),
        ("a b", "a b"),
    ],
)
def test_host_without_a_port_gets_the_usual_one(typed: str, expected: str) -> None:
    assert with_port(typed) == expected


def test_overlong_unix_socket_path_is_rejected() -> None:
    with refused(InvalidValue):
        Address.parse("unix:/" + "ä" * 52)


@settings(deadline=None)
@given(st.from_regex(r"[a-z0-9.-]{1,30}", fullmatch=True), st.integers(0, 65535))
def test_address_survives_a_round_trip_through_text(host: str, port: int) -> None:
    assert Address.parse(str(Address(host, port))) == Address(host, port)


def test_address_has_a_readable_description() -> None:
    assert Address("gpu-box", 7000).description == "gpu-box, port 7000"
    assert Address("", 7000).description == "all interfaces, port 7000"
    assert Address(path="/run/e").description == "unix socket /run/e"


def test_token_holds_the_secret_and_the_certificate_fingerprint() -> None:
    x509 = pytest.importorskip("cryptography.x509")
    hashes = pytest.importorskip("cryptography.hazmat.primitives.hashes")
    certificate = x509.load_pem_x509_certificate(SECURE.certificate.encode())
    assert SECURE.token.fingerprint == certificate.fingerprint(hashes.SHA256())
    assert SECURE.token.secret == SECURE.secret
    assert certificate.public_key().curve.name == "secp256r1"


def test_insecure_identity_has_no_certificate() -> None:
    assert INSECURE.certificate == INSECURE.key == ""
    assert INSECURE.token.fingerprint is None


def test_two_identities_share_nothing() -> None:
    other = make_identity()
    assert other.secret != SECURE.secret
    assert other.token.fingerprint != SECURE.token.fingerprint


def test_saved_identity_loads_unchanged_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "identity.json"
    SECURE.save(path)
    assert Identity.load(path) == SECURE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["identity.json"]


def test_failed_save_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        SECURE.save(tmp_path / "taken")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_invalid_identity_file_is_rejected(tmp_path: Path) -> None:
    with refused(MissingFile):
        Identity.load(tmp_path / "none")
    for number, data in enumerate((b"", b"{}", b'{"secret": "QUJD"}', b"\xff\xfe")):
        path = tmp_path / str(number)
        path.write_bytes(data)
        with refused(InvalidFile):
            Identity.load(path)


def test_printed_identity_hides_its_key_and_secret() -> None:
    shown = repr(SECURE)
    assert "PRIVATE" not in shown
    assert hashlib.sha256(SECURE.secret).hexdigest() not in shown
    assert shown == f"Identity({SECURE.token!r})"


def test_missing_cryptography_raises_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with refused(MissingExtra):
        make_identity()
    assert make_identity(insecure=True).token.insecure


@pytest.mark.parametrize(
    ("address", "host"),
    [(Address("10.0.0.5", 7000), "10.0.0.5"), (Address("::1", 7000), "::1"), (Address(path="/run/evener.sock"), "")],
)
def test_host_is_read_from_an_address_description(address: Address, host: str) -> None:
    assert host_in(address.description) == host
