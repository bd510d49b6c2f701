"""The TLS 1.3 transport: OpenSSL works on memory, and the socket moves large pieces.

An SSLSocket would read the socket twice for every record of 16 KB, its five-byte head and the rest. With memory in
between, many records come with one call. Certificates are not checked against authorities or names: a node compares
the fingerprint with that of its token. Both sides include the fingerprint in their proofs (handshake.py), so a proof is
worthless on another connection. Session tickets are off, because sessions are never resumed.

Keys are not renewed within a connection: Python's ssl has no call for it, and OpenSSL does not do it automatically. A
transport ends well before its keys have protected too many bytes (`KEY_BYTES`); the node then reconnects.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from evener.wire.identity import Identity
from evener.wire.sockets import WITHOUT_BLOCKING, unacknowledged_bytes
from evener.wire.transport import CHUNK, NotTls

KEY_BYTES = 256 * 2**30
"""Limit of bytes per direction: RFC 8446, 5.5, allows 2**24.5 full records, 388 GB, under one key of AES-GCM."""
_RECORD_BYTES = 16 * 1024
_MIN_PULL_BYTES = 128 * 1024
_HANDSHAKE_PULL_BYTES = 16 * 1024
_FIRST_BYTES = 8
_ALERT, _HANDSHAKE = 0x15, 0x16
"""Types of the records with which a TLS peer may begin."""
_scratch = threading.local()


class TlsTransport:
    """An encrypted transport; one thread may send while another one receives.

    Args:
        sock: A connected socket.
        context: The context of `master_context` or `node_context`.
        is_master: Whether this side shows the certificate.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, is_master: bool) -> None:
        self.sock = sock
        self.wire_bytes_sent = self.wire_bytes_received = 0
        self._inward, self._outward = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._inward, self._outward, server_side=is_master)
        self._read: Callable[[int, memoryview], int] = self._tls.read  # type: ignore[assignment]  # given a buffer
        self._lock = threading.Lock()  # OpenSSL's object must not be used by two threads at once
        self._unsent = memoryview(b"")

    @property
    def has_unsent(self) -> bool:
        """Whether encrypted bytes wait for the kernel."""
        return bool(self._unsent)

    @property
    def has_unread(self) -> bool:
        """Whether received bytes wait to be decrypted; they may be a part of a record."""
        return bool(self._inward.pending or self._tls.pending())

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes that the peer has not confirmed."""
        return unacknowledged_bytes(self.sock)

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the peer's certificate, after the handshake."""
        certificate = self._tls.getpeercert(binary_form=True)
        assert certificate is not None
        return hashlib.sha256(certificate).digest()

    def handshake(self) -> None:
        """Agree on keys; call again after BlockingIOError."""
        while not self._shake():
            self.flush()
            if not self._pull(_HANDSHAKE_PULL_BYTES):
                raise ConnectionResetError("closed during the TLS handshake")
        self.flush()

    def receive_into(self, view: memoryview) -> int:
        """Fill the front of `view` with decrypted bytes; return their number."""
        view = view[:CHUNK]
        while True:
            count = self._decrypt(view)
            if count is not None:
                return count
            if not self._pull(max(_MIN_PULL_BYTES, len(view) + _RECORD_BYTES)):
                return 0

    def send(self, views: Sequence[memoryview]) -> int:
        """Encrypt bytes from the front of `views`; return their number."""
        self.flush()
        taken = self._encrypt(views)
        with contextlib.suppress(BlockingIOError):  # the bytes are encrypted already, and wait in `_unsent`
            self._push()
        return taken

    def flush(self) -> None:
        """Send encrypted bytes that wait."""
        while self._unsent:
            self._push()

    def _shake(self) -> bool:
        try:
            self._tls.do_handshake()
            return True
        except ssl.SSLWantReadError:
            return False
        finally:
            self._unsent = memoryview(bytes(self._unsent) + self._outward.read())

    def _decrypt(self, view: memoryview) -> int | None:
        """Fill the front of `view` with received bytes; return None if there is no whole record."""
        filled, size = 0, len(view)
        with self._lock:
            try:
                while filled < size and (self._inward.pending or self._tls.pending()):
                    count = self._read(size - filled, view[filled:])
                    if count == 0:  # the peer has closed its TLS stream
                        return filled
                    filled += count
            except ssl.SSLWantReadError:
                pass  # the rest of a record has not come yet
        return filled or None

    def _encrypt(self, views: Sequence[memoryview]) -> int:
        taken = 0
        with self._lock:
            for view in views:
                if taken == CHUNK:
                    break
                if piece := view[: CHUNK - taken]:
                    taken += self._tls.write(piece)
            self._unsent = memoryview(self._outward.read())
        return taken

    def _pull(self, max_bytes: int) -> int:
        raw = _scratch_view()[:max_bytes]
        count = self.sock.recv_into(raw)
        if self.wire_bytes_received == 0 and count and raw[0] not in (_ALERT, _HANDSHAKE):
            raise NotTls(bytes(raw[: min(count, _FIRST_BYTES)]))
        self.wire_bytes_received += count
        self._require_fresh_keys()
        with self._lock:
            self._inward.write(raw[:count])
        return count

    def _push(self) -> None:
        count = self.sock.send(self._unsent, WITHOUT_BLOCKING)
        self.wire_bytes_sent += count
        self._unsent = self._unsent[count:]
        self._require_fresh_keys()

    def _require_fresh_keys(self) -> None:
        if max(self.wire_bytes_sent, self.wire_bytes_received) > KEY_BYTES:
            raise ConnectionResetError(f"its keys have protected the limit of {KEY_BYTES} bytes; connect again")


def _scratch_view() -> memoryview:
    """Return the memory for encrypted bytes between socket and OpenSSL, shared by a thread's connections."""
    if not hasattr(_scratch, "view"):
        _scratch.view = memoryview(bytearray(CHUNK + 2 * _RECORD_BYTES))
    view: memoryview = _scratch.view
    return view


def master_context(identity: Identity) -> ssl.SSLContext:
    """Return the TLS context of a master, with its certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    with _file_of(identity.certificate + identity.key) as chain:
        context.load_cert_chain(chain)
    return context


@contextlib.contextmanager
def _file_of(text: str) -> Iterator[str]:
    """Yield a file that holds `text`, in memory if possible: OpenSSL reads certificates only from files."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        with open(os.memfd_create("evener-certificate"), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
        return
    with tempfile.TemporaryDirectory() as folder:  # mode 0700
        file_there = Path(folder, "chain.pem")
        file_there.write_text(text, encoding="utf-8")
        yield str(file_there)


def node_context() -> ssl.SSLContext:
    """Return the TLS context of a node; the caller has to compare the fingerprint."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
