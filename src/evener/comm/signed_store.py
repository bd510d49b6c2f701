"""The store where ranks find each other, with every value signed: who reaches it and lacks the secret is no rank.

PyTorch's stores ask nobody who he is. A value is written with a keyed hash of it and of its key (HMAC-SHA256), and one
that was not is refused; the secret comes to each rank by whoever started it, never through the store. What PyTorch's
own groups leave there, the addresses of their connections, is signed with it.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from evener.comm.waiting import never, slices
from evener.records.errors import NodeLost

TAG_BYTES = 32
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05
_stores: Any = dist  # whose stores are not typed


class SignedStore(_stores.Store):  # type: ignore[misc]
    """Passes everything on to another store, signed.

    PyTorch's groups and prefixes do not keep it alive: whoever makes one of it has to.

    Args:
        inner: the other one.
        secret: of all ranks of this run.
        prefix: of all keys.
        is_over: asked while a value is waited for: whether nobody wants it any more.

    Attributes:
        inner: see above.
        secret: see above.
        is_over: see above.
    """

    def __init__(self, inner: Any, secret: bytes, prefix: str = "", is_over: Callable[[], bool] = never) -> None:
        super().__init__()
        self.inner, self.secret, self.is_over, self._prefix = inner, secret, is_over, prefix

    def under(self, prefix: str) -> SignedStore:
        """The part of the store whose keys begin with `prefix` and a slash."""
        return SignedStore(self.inner, self.secret, f"{self._prefix}{prefix}/", self.is_over)

    def until(self, is_over: Callable[[], bool]) -> SignedStore:
        """The same store, where values are waited for only until `is_over`."""
        return SignedStore(self.inner, self.secret, self._prefix, is_over)

    def set(self, key: str, value: str | bytes) -> None:
        """Leave a value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        key = self._prefix + key
        self.inner.set(key, self._tag(key, data) + data)

    def get(self, key: str) -> bytes:
        """A value, once it is there. Raises NodeLost: no rank of this run has left it, or nobody wants it any more."""
        if self.is_over is not never:
            self.wait([key])
        key = self._prefix + key
        signed: bytes = self.inner.get(key)
        tag, data = signed[:TAG_BYTES], signed[TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(key, data)):
            raise NodeLost(
                f"the store of the ranks has a value ({key}) that was not signed with their secret: "
                "$EVENER_SECRET has to be the same on all machines, and known to nobody else"
            )
        return data

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all these values are there. Raises NodeLost: one of them was not signed."""
        if not self.inner.check([self._prefix + key for key in keys]):
            return False
        for key in keys:
            self.get(key)
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all these values are there. Raises NodeLost: nobody wants them any more."""
        names = [self._prefix + key for key in keys]
        if self.is_over is never:
            self.inner.wait(names, *(() if timeout is None else (timeout,)))
            return
        seconds = (self.inner.timeout if timeout is None else timeout).total_seconds()
        if not self._poll(names, time.monotonic() + seconds):
            raise dist.DistStoreError(f"{', '.join(names)} did not come within {seconds:g} s")

    def _poll(self, names: list[str], deadline: float) -> bool:
        """Whether the values came in time: a store that is waited in cannot be left."""
        pause = _SHORTEST_PAUSE
        for left in slices(deadline, self.is_over):
            if self.inner.check(names):
                return True
            time.sleep(min(left, pause))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return bool(self.inner.check(names))

    def set_timeout(self, timeout: timedelta) -> None:
        """How long values are waited for."""
        self.inner.set_timeout(timeout)

    def delete_key(self, key: str) -> bool:
        """Remove a value; whether it was there."""
        return bool(self.inner.delete_key(self._prefix + key))

    def num_keys(self) -> int:
        """Of all values."""
        return int(self.inner.num_keys())

    def _tag(self, key: str, data: bytes) -> bytes:
        head = key.encode()
        return hmac.digest(self.secret, b"evener store %d " % len(head) + head + data, "sha256")
