"""Who a master is: certificate, key and secret, made once and kept, so that nodes know it again after a restart."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from evener.atomic import atomic_write
from evener.errors import InvalidFile, MissingExtra, MissingFile, require
from evener.wire.token import SECRET_BYTES, Token

_DAYS = 3650
_CLOCK_SKEW = timedelta(days=1)


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A master's certificate with its key, and the secret of its nodes; its `repr` shows neither.

    Attributes:
        secret: 16 random bytes.
        certificate: self-signed, PEM; empty without TLS.
        key: of the certificate, PEM; empty without TLS.
    """

    secret: bytes
    certificate: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        require(len(self.secret) == SECRET_BYTES, "bytes of the secret", len(self.secret), str(SECRET_BYTES))

    @property
    def token(self) -> Token:
        """What nodes join with."""
        import hashlib
        import ssl

        if not self.certificate:
            return Token(secret=self.secret, fingerprint=None)
        return Token(
            secret=self.secret, fingerprint=hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.certificate)).digest()
        )

    def save(self, path: Path) -> None:
        """Write the identity to `path`, readable for this user only, whole or not at all."""
        atomic_write(path, msgspec.json.encode(self), private=True)

    @classmethod
    def load(cls, path: Path) -> Identity:
        """The identity in `path`.

        Raises:
            MissingFile: there is none.
            InvalidFile: it is damaged.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise MissingFile(f"cannot read the master's identity {path}: {error.strerror}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidFile(f"{path} is not a master's identity: {error}; remove it for a new one") from error

    def __repr__(self) -> str:
        return f"Identity({self.token!r})"


def make_identity(*, insecure: bool = False) -> Identity:
    """A new identity with a random secret and, unless `insecure`, an ECDSA P-256 certificate.

    Raises:
        MissingExtra: `cryptography`, which makes certificates, is not installed.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    if insecure:
        return Identity(secret=secret)
    certificate, key = _make_certificate()
    return Identity(secret=secret, certificate=certificate, key=key)


def _make_certificate() -> tuple[str, str]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise MissingExtra(
            "a certificate is made with cryptography: pip install cryptography, or use --insecure"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "evener master")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=_DAYS))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem).decode(), private.decode()
