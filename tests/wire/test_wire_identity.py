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
from evener.wire.identity import Address, Identity, Token, host_in, make_identity
from support.refusals import refused
from support.wire_peers import INSECURE, SECURE

secrets = st.binary(min_size=16, max_size=16)
fingerprints = st.none() | st.binary(min_size=32, max_size=32)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
TOKEN = Token(secret=bytes(range(16)), fingerprint=bytes(range(100, 132)))


def test_a_literal_token() -> None:
    token = Token(secret=bytes(16), fingerprint=None)
    assert token.text == "evener1-AAAAAAAAAAAAAAAAAAAAAGVMPhQ"
    assert token.insecure
    assert not TOKEN.insecure


@settings(deadline=None)
@given(secrets, fingerprints)
def test_text_and_token_are_the_same_thing(secret: bytes, fingerprint: bytes | None) -> None:
    token = Token(secret=secret, fingerprint=fingerprint)
    assert Token.parse(token.text) == token
    assert len(token.text) == (35 if fingerprint is None else 78)


@settings(deadline=None)
@given(secrets, fingerprints, st.data())
def test_one_wrong_character_anywhere_is_noticed(secret: bytes, fingerprint: bytes | None, data: st.DataObject) -> None:
    text = Token(secret=secret, fingerprint=fingerprint).text
    place = data.draw(st.integers(0, len(text) - 1))
    wrong = data.draw(st.sampled_from(LETTERS + " .é").filter(lambda letter: letter != text[place]))
    with pytest.raises(BadToken, match="copy the whole token"):
        Token.parse(text[:place] + wrong + text[place + 1 :])


def test_the_last_character_counts_although_not_all_its_bits_carry_anything() -> None:
    text = TOKEN.text
    for wrong in set(LETTERS) - {text[-1]}:
        with pytest.raises(BadToken):
            Token.parse(text[:-1] + wrong)


@settings(deadline=None)
@given(secrets, fingerprints, st.data())
def test_a_token_cut_short_is_noticed(secret: bytes, fingerprint: bytes | None, data: st.DataObject) -> None:
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
def test_the_sentence_says_what_is_wrong(text: str, rule: str) -> None:
    with pytest.raises(BadToken, match=rule):
        Token.parse(text)


def test_line_breaks_of_a_terminal_do_not_matter() -> None:
    text = TOKEN.text
    assert Token.parse(f"  {text[:30]}\r\n  {text[30:]}\n") == TOKEN


def test_printing_a_token_by_mistake_does_not_show_its_secret() -> None:
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
def test_literal_addresses(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert str(address) == text.strip()


@pytest.mark.parametrize(
    "text",
    ["", "gpu-box", "gpu-box:", "7000", "::1:7000", "[::1]", "a b:7000", "host:70000", "host:-1", "unix:", "tcp://a:1"],
)
def test_what_is_no_address_is_refused_with_the_three_forms(text: str) -> None:
    with refused(InvalidValue):
        Address.parse(text)


def test_a_path_longer_than_a_unix_socket_may_have_is_refused() -> None:
    with refused(InvalidValue):
        Address.parse("unix:/" + "ä" * 52)


@settings(deadline=None)
@given(st.from_regex(r"[a-z0-9.-]{1,30}", fullmatch=True), st.integers(0, 65535))
def test_text_and_address_are_the_same_thing(host: str, port: int) -> None:
    assert Address.parse(str(Address(host, port))) == Address(host, port)


def test_an_address_reads_well_in_a_sentence() -> None:
    assert Address("gpu-box", 7000).description == "gpu-box, port 7000"
    assert Address("", 7000).description == "all interfaces, port 7000"
    assert Address(path="/run/e").description == "unix socket /run/e"


def test_the_token_carries_the_certificates_fingerprint_and_the_secret() -> None:
    x509 = pytest.importorskip("cryptography.x509")
    hashes = pytest.importorskip("cryptography.hazmat.primitives.hashes")
    certificate = x509.load_pem_x509_certificate(SECURE.certificate.encode())
    assert SECURE.token.fingerprint == certificate.fingerprint(hashes.SHA256())
    assert SECURE.token.secret == SECURE.secret
    assert certificate.public_key().curve.name == "secp256r1"


def test_without_tls_there_is_no_certificate() -> None:
    assert INSECURE.certificate == INSECURE.key == ""
    assert INSECURE.token.fingerprint is None


def test_two_identities_share_nothing() -> None:
    other = make_identity()
    assert other.secret != SECURE.secret
    assert other.token.fingerprint != SECURE.token.fingerprint


def test_a_restarted_master_is_the_same_one_and_its_file_is_its_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "identity.json"
    SECURE.save(path)
    assert Identity.load(path) == SECURE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["identity.json"]


def test_a_failed_save_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        SECURE.save(tmp_path / "taken")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_what_is_no_identity_is_refused(tmp_path: Path) -> None:
    with refused(MissingFile):
        Identity.load(tmp_path / "none")
    for number, data in enumerate((b"", b"{}", b'{"secret": "QUJD"}', b"\xff\xfe")):
        path = tmp_path / str(number)
        path.write_bytes(data)
        with refused(InvalidFile):
            Identity.load(path)


def test_printing_an_identity_by_mistake_shows_neither_key_nor_secret() -> None:
    shown = repr(SECURE)
    assert "PRIVATE" not in shown
    assert hashlib.sha256(SECURE.secret).hexdigest() not in shown
    assert shown == f"Identity({SECURE.token!r})"


def test_a_missing_cryptography_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with refused(MissingExtra):
        make_identity()
    assert make_identity(insecure=True).token.insecure


@pytest.mark.parametrize(
    ("address", "host"),
    [(Address("10.0.0.5", 7000), "10.0.0.5"), (Address("::1", 7000), "::1"), (Address(path="/run/evener.sock"), "")],
)
def test_the_host_is_read_from_an_address_in_a_sentence(address: Address, host: str) -> None:
    assert host_in(address.description) == host
