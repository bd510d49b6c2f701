"""The identity of a master: its address, certificate and secret, and the token with which nodes join."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from evener.records.atomic import atomic_write
from evener.records.decoding import decode_json
from evener.records.errors import InvalidFile, InvalidValue, MissingExtra, MissingFile, require
from evener.records.schema import NOT_DECODED
from evener.wire.errors import BadToken

FINGERPRINT_BYTES = 32
SECRET_BYTES = 16
LOCALHOST = "localhost"
"""Name of this machine, which needs no name service."""
MASTER_PORT = 7117
"""Default port of a master."""
_HOST = re.compile(r"^(?:\[[^\[\]]+\]|[^\[\]:/\s]*[^\[\]:/\s0-9][^\[\]:/\s]*)$")
"""A host without a port; digits alone are a port without a host."""
_HOST_AND_PORT = re.compile(r"^(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<plain>[^\[\]:/\s]*)):(?P<port>[0-9]{1,5})$")
_MAX_PATH_BYTES = 103
"""Longest path of a Unix socket on every system (Linux 107, macOS 103)."""
_PREFIX = "evener1-"
_CHECK_BYTES = 4
_ADVICE = "copy the whole token that `evener up` printed"
_VALIDITY = timedelta(days=3650)
_CLOCK_SKEW = timedelta(days=1)


class Address(msgspec.Struct, frozen=True):
    """A TCP port or a Unix socket; `parse` reads its `str()`.

    Attributes:
        host: Name or IP address; empty for all interfaces (listening) and for Unix sockets.
        port: Port; 0 lets the system choose a free one when listening.
        path: Path of a Unix socket, or empty.
    """

    host: str = ""
    port: int = 0
    path: str = ""

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, "port", self.port, "between 0 and 65535")
        length = len(self.path.encode(errors="surrogateescape"))
        require(length <= _MAX_PATH_BYTES, "address", str(self), f"unix: and a path of at most {_MAX_PATH_BYTES} bytes")

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse an address: `10.0.0.5:7000`, `gpu-box:7000`, `[::1]:7000`, `:0` or `unix:/run/evener.sock`.

        Raises:
            InvalidValue: The text is none of these.
        """
        text = text.strip()
        if text.startswith("unix:") and len(text) > len("unix:"):
            return cls(path=text.removeprefix("unix:"))
        match = _HOST_AND_PORT.match(text)
        if match is None or int(match["port"]) > 65535:
            raise InvalidValue("address", text, "HOST:PORT, [IPV6]:PORT or unix:PATH")
        return cls(host=match["bracketed"] or match["plain"] or "", port=int(match["port"]))

    @property
    def description(self) -> str:
        """The address as text in a sentence: `gpu-box, port 7000`."""
        return f"unix socket {self.path}" if self.path else f"{self.host or 'all interfaces'}, port {self.port}"

    @property
    def is_everywhere(self) -> bool:
        """Whether a server that listens at this address listens on all interfaces."""
        return not self.path and self.host in ("", "0.0.0.0", "::")

    @property
    def to_dial(self) -> Address:
        """The address to connect to: that of this machine if all interfaces are meant."""
        return Address(LOCALHOST, self.port) if self.is_everywhere else self

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def with_port(addresses: str, port: int = MASTER_PORT) -> str:
    """Return `addresses`, which commas may separate, with `port` for each host without one."""
    return ",".join(f"{one.strip()}:{port}" if _HOST.match(one.strip()) else one for one in addresses.split(","))


def host_in(description: str) -> str:
    """Return the host in the text of an address; empty for a socket of this machine."""
    return description.rpartition(", port ")[0]


Role = Literal["node", "submitter", "admin"]
"""What a token allows: to be a node; to submit and watch runs; everything."""
ROLES: tuple[Role, ...] = ("node", "submitter", "admin")


class Grant(NamedTuple):
    """The role of a token, and the invitation that it belongs to; empty if there is none."""

    role: Role = "admin"
    invitation: str = ""


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """The secret and fingerprint with which a node joins a master; its `repr` hides the secret.

    Attributes:
        secret: 16 random bytes that master and nodes share.
        fingerprint: SHA-256 of the master's certificate; None if the master runs without TLS.
    """

    secret: bytes
    fingerprint: bytes | None

    def __post_init__(self) -> None:
        _require_length("secret", self.secret, SECRET_BYTES)
        if self.fingerprint is not None:
            _require_length("fingerprint", self.fingerprint, FINGERPRINT_BYTES)

    @property
    def insecure(self) -> bool:
        """Whether the master runs without TLS."""
        return self.fingerprint is None

    @property
    def text(self) -> str:
        """The token as text: 78 characters, or 35 without TLS."""
        return _text(self.secret + (self.fingerprint or b""))

    @classmethod
    def parse(cls, text: str) -> Token:
        """Parse a token, ignoring line breaks and spaces.

        Raises:
            BadToken: The text is not a token, or is mistyped or incomplete.
        """
        text = "".join(text.split())
        if not text.startswith(_PREFIX):
            fault = "what was given does not" if text else "nothing was given"  # not shown: it may be another secret
            raise BadToken(f"a token begins with {_PREFIX}, and {fault}; {_ADVICE}")
        body = _decode(text.removeprefix(_PREFIX))[:-_CHECK_BYTES]
        if len(body) not in (SECRET_BYTES, SECRET_BYTES + FINGERPRINT_BYTES):
            raise BadToken(f"a token has 35 or 78 characters, got {len(text)}; {_ADVICE}")
        if text != _text(body):
            raise BadToken(f"the token is mistyped: its last characters do not fit the others; {_ADVICE}")
        return cls(secret=body[:SECRET_BYTES], fingerprint=body[SECRET_BYTES:] or None)

    def __repr__(self) -> str:
        shown = "insecure" if self.fingerprint is None else self.fingerprint.hex()[:16]
        return f"Token({shown}, secret hidden)"


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A master's certificate with its key, and the secret of its nodes, so that nodes know it after a restart.

    Its `repr` shows neither.

    Attributes:
        secret: 16 random bytes.
        certificate: Self-signed certificate, PEM; empty without TLS.
        key: Key of the certificate, PEM; empty without TLS.
    """

    secret: bytes
    certificate: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        _require_length("secret", self.secret, SECRET_BYTES)

    @property
    def token(self) -> Token:
        """The token of an admin, which allows everything."""
        if not self.certificate:
            return Token(secret=self.secret, fingerprint=None)
        import ssl

        der = ssl.PEM_cert_to_DER_cert(self.certificate)
        return Token(secret=self.secret, fingerprint=hashlib.sha256(der).digest())

    def token_of(self, role: Role) -> Token:
        """Return the token of a `role`; it is derived from the master's secret and does not reveal it."""
        return self.token if role == "admin" else self._derived(f"role {role}")

    def token_of_invitation(self, invitation: str) -> Token:
        """Return the token of an invitation, derived in the same way."""
        return self._derived(f"invitation {invitation}")

    def _derived(self, label: str) -> Token:
        secret = hmac.digest(self.secret, f"evener {label}".encode(), "sha256")[:SECRET_BYTES]
        return Token(secret=secret, fingerprint=self.token.fingerprint)

    def rotated(self) -> Identity:
        """Return the same master with another secret, which makes all earlier tokens invalid."""
        return Identity(secret=secrets.token_bytes(SECRET_BYTES), certificate=self.certificate, key=self.key)

    def save(self, path: Path) -> None:
        """Write the identity to `path` atomically, readable for this user only."""
        atomic_write(path, msgspec.json.encode(self), private=True)

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Return the identity in `path`.

        Raises:
            MissingFile: There is no such file.
            InvalidFile: The file is damaged.
        """
        try:
            return decode_json(path.read_bytes(), cls)
        except OSError as error:
            raise MissingFile(f"cannot read the master's identity {path}: {error.strerror}") from error
        except NOT_DECODED as error:
            raise InvalidFile(f"{path} is not a master's identity: {error}; remove it for a new one") from error

    def __repr__(self) -> str:
        return f"Identity({self.token!r})"


def make_identity(*, insecure: bool = False) -> Identity:
    """Return a new identity with a random secret and, unless `insecure`, an ECDSA P-256 certificate.

    Raises:
        MissingExtra: `cryptography`, which makes certificates, is not installed.
    """
    certificate, key = ("", "") if insecure else _make_certificate()
    return Identity(secret=secrets.token_bytes(SECRET_BYTES), certificate=certificate, key=key)


def _make_certificate() -> tuple[str, str]:
    """Return a self-signed certificate and its key, PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise MissingExtra(
            "making a certificate needs cryptography: pip install cryptography, or use --insecure"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "evener master")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALIDITY)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem).decode(), private.decode()


def _require_length(what: str, value: bytes, length: int) -> None:
    require(len(value) == length, f"bytes of the {what}", len(value), str(length))


def _text(body: bytes) -> str:
    check = hashlib.sha256(_PREFIX.encode() + body).digest()[:_CHECK_BYTES]
    return _PREFIX + base64.urlsafe_b64encode(body + check).decode().rstrip("=")


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadToken(f"the token is mistyped: it has characters or a length that no token has; {_ADVICE}") from error
