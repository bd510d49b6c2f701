"""The rendezvous store of the ranks, with a signature on every value: only ranks with the secret can write to it.

PyTorch's stores do not authenticate clients. This store writes every value with an HMAC-SHA256 of key and value, and
rejects others. The process that starts a rank gives it the secret, which never passes through the store. The addresses
that PyTorch's groups write are signed, too.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from evener.comm.waiting import never, slices
from evener.records.decoding import decode_json
from evener.records.errors import NodeLost
from evener.records.schema import shown

T = TypeVar("T")
TAG_BYTES = 32
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.0005, 0.05
_stores: Any = dist  # its stores are not typed


class SignedStore(_stores.Store):  # type: ignore[misc]
    """A store that signs all values of another store.

    PyTorch's groups do not keep a reference to it: their creator has to.

    Args:
        inner: the other store.
        secret: of all ranks of this run.
        prefix: of all keys.
        is_over: called during waits; true ends the wait.

    Attributes:
        inner: the other store.
        secret: of all ranks of this run.
        is_over: called during waits; true ends the wait.
    """

    def __init__(self, inner: Any, secret: bytes, prefix: str = "", is_over: Callable[[], bool] = never) -> None:
        super().__init__()
        self.inner, self.secret, self.is_over, self._prefix = inner, secret, is_over, prefix

    def under(self, prefix: str) -> SignedStore:
        """Return the part of the store whose keys begin with `prefix` and a slash."""
        return SignedStore(self.inner, self.secret, f"{self._prefix}{prefix}/", self.is_over)

    def until(self, is_over: Callable[[], bool]) -> SignedStore:
        """Return the same store, which waits for values only until `is_over`."""
        return SignedStore(self.inner, self.secret, self._prefix, is_over)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        key = self._prefix + key
        self.inner.set(key, self._tag(key, data) + data)

    def get(self, key: str) -> bytes:
        """Return a value, once it exists. Raises NodeLost if its signature is wrong or the wait is over."""
        if self.is_over is not never:
            self.wait([key])
        key = self._prefix + key
        signed: bytes = self.inner.get(key)
        tag, data = signed[:TAG_BYTES], signed[TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(key, data)):
            raise NodeLost(
                f"the store of the ranks has a value ({key}) that was not signed with their secret: "
                "$EVENER_SECRET has to be the same on all machines, and secret"
            )
        return data

    def get_as(self, key: str, kind: type[T]) -> T:
        """Return a value that was published as JSON, once it exists. Raises NodeLost if it is no `kind`."""
        data = self.get(key)
        try:
            return decode_json(data, kind)
        except msgspec.DecodeError as error:
            raise NodeLost(
                f"a rank has published '{shown(data.decode(errors='replace'))}' as {self._prefix}{key}, which this "
                f"version does not understand ({error}): install the same version of Evener on all nodes"
            ) from error

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all these values exist. Raises NodeLost if a signature is wrong."""
        if not self.inner.check([self._prefix + key for key in keys]):
            return False
        for key in keys:
            self.get(key)
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all these values exist. Raises NodeLost if the wait is over."""
        names = [self._prefix + key for key in keys]
        if self.is_over is never:
            self.inner.wait(names, *(() if timeout is None else (timeout,)))
            return
        seconds = (self.inner.timeout if timeout is None else timeout).total_seconds()
        if not self._poll(names, time.monotonic() + seconds):
            raise dist.DistStoreError(f"{', '.join(names)} did not come within {seconds:g} s")

    def _poll(self, names: list[str], deadline: float) -> bool:
        """Whether the values exist before the deadline; polls, because a wait in the inner store cannot be aborted."""
        pause = _MIN_PAUSE_S
        for seconds in slices(deadline, self.is_over):
            if self.inner.check(names):
                return True
            time.sleep(min(seconds, pause))
            pause = min(2 * pause, _MAX_PAUSE_S)
        return bool(self.inner.check(names))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long to wait for values."""
        self.inner.set_timeout(timeout)

    def delete_key(self, key: str) -> bool:
        """Delete a value; return whether it existed."""
        return bool(self.inner.delete_key(self._prefix + key))

    def num_keys(self) -> int:
        """Return the number of values."""
        return int(self.inner.num_keys())

    def _tag(self, key: str, data: bytes) -> bytes:
        head = key.encode()
        return hmac.digest(self.secret, b"evener store %d " % len(head) + head + data, "sha256")
