"""A master's identity outlives the master and shows its secret to nobody else."""

import hashlib
import stat
import sys
from pathlib import Path

import pytest
from wire_peers import INSECURE, SECURE

from evener.errors import InvalidFile, MissingExtra, MissingFile
from evener.wire.identity import Identity, make_identity


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
    with pytest.raises(MissingFile, match="cannot read the master's identity"):
        Identity.load(tmp_path / "none")
    for number, data in enumerate((b"", b"{}", b'{"secret": "QUJD"}', b"\xff\xfe")):
        path = tmp_path / str(number)
        path.write_bytes(data)
        with pytest.raises(InvalidFile, match=r"is not a master's identity: .*; remove it for a new one"):
            Identity.load(path)


def test_printing_an_identity_by_mistake_shows_neither_key_nor_secret() -> None:
    shown = repr(SECURE)
    assert "PRIVATE" not in shown
    assert hashlib.sha256(SECURE.secret).hexdigest() not in shown
    assert shown == f"Identity({SECURE.token!r})"


def test_a_missing_cryptography_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(MissingExtra, match="pip install cryptography, or use --insecure"):
        make_identity()
    assert make_identity(insecure=True).token.insecure
