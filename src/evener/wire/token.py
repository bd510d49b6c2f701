"""The string that a master prints and a node joins with: whom to trust and what to prove, safe against mistyping."""

from __future__ import annotations

import base64
import binascii
import hashlib

import msgspec

from evener.errors import require
from evener.wire.refusals import BadToken

FINGERPRINT_BYTES = 32
SECRET_BYTES = 16
_PREFIX = "evener1-"
_CHECK_BYTES = 4
_ADVICE = "copy the whole token that `evener up` printed"


class Token(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """What a node needs to join a master; its `repr` keeps the secret.

    Attributes:
        secret: 16 random bytes that master and nodes share.
        fingerprint: SHA-256 of the master's certificate; None if the master runs without TLS.
    """

    secret: bytes
    fingerprint: bytes | None

    def __post_init__(self) -> None:
        require(len(self.secret) == SECRET_BYTES, "bytes of the secret", len(self.secret), str(SECRET_BYTES))
        if self.fingerprint is not None:
            length = len(self.fingerprint)
            require(length == FINGERPRINT_BYTES, "bytes of the fingerprint", length, str(FINGERPRINT_BYTES))

    @property
    def insecure(self) -> bool:
        """Whether the master runs without TLS."""
        return self.fingerprint is None

    @property
    def text(self) -> str:
        """The token as it is printed: 78 characters, or 35 without TLS."""
        return _text(self.secret + (self.fingerprint or b""))

    @classmethod
    def parse(cls, text: str) -> Token:
        """The token in `text`, in which line breaks and spaces do not matter.

        Raises:
            BadToken: it is not a token, or mistyped, or cut short.
        """
        text = "".join(text.split())
        if not text.startswith(_PREFIX):
            raise BadToken(f"a token begins with {_PREFIX}, got {text[:12]!r}; {_ADVICE}")
        body = _decode(text.removeprefix(_PREFIX))[:-_CHECK_BYTES]
        if len(body) not in (SECRET_BYTES, SECRET_BYTES + FINGERPRINT_BYTES):
            raise BadToken(f"a token has 35 or 78 characters, got {len(text)}; {_ADVICE}")
        if text != _text(body):
            raise BadToken(f"the token is mistyped: its last characters do not fit the others; {_ADVICE}")
        return cls(secret=body[:SECRET_BYTES], fingerprint=body[SECRET_BYTES:] or None)

    def __repr__(self) -> str:
        shown = "insecure" if self.fingerprint is None else self.fingerprint.hex()[:16]
        return f"Token({shown}, secret hidden)"


def _text(body: bytes) -> str:
    check = hashlib.sha256(_PREFIX.encode() + body).digest()[:_CHECK_BYTES]
    return _PREFIX + base64.urlsafe_b64encode(body + check).decode().rstrip("=")


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadToken(f"the token is mistyped: it has characters or a length that no token has; {_ADVICE}") from error
