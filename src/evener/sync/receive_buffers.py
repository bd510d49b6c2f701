"""Memory for contributions that are arriving at a server: one per worker, until it is merged."""

from __future__ import annotations

import numpy as np

from evener.sync.compression import Bytes, compressor_for
from evener.sync.layout import StateLayout
from evener.sync.protocol import Compression
from evener.sync.threads import BLOCK_BYTES, ThreadPool
from evener.sync.weights import Buffer, BufferPool


class ReceiveBuffers:
    """Memory for arriving contributions, one per worker.

    Args:
        layout: layout of the weights.
        compression: compression of the contributions.
        cores: threads that unpack them.
        thin: compression of contributions over slow links.
        is_streamed: whether they may be merged while they arrive.

    Attributes:
        num_bytes: exact size of a contribution.
        thin_bytes: exact size of one over a slow link.
        comes_in_parts: whether parts can be merged before the rest has arrived; less than a block never is.
    """

    def __init__(
        self,
        layout: StateLayout,
        compression: Compression,
        cores: ThreadPool,
        thin: Compression = "none",
        *,
        is_streamed: bool = True,
    ) -> None:
        self._packing, self._thin = compressor_for(layout, compression, cores), compressor_for(layout, thin, cores)
        self._pool = BufferPool(layout)
        self._pages: dict[str, Buffer] = {}
        self._images: dict[str, Bytes] = {}
        self.num_bytes = layout.num_bytes if self._packing is None else self._packing.num_bytes
        self.thin_bytes = self.num_bytes if self._thin is None else self._thin.num_bytes
        self.comes_in_parts = is_streamed and self._packing is None and self.num_bytes > BLOCK_BYTES

    def fits(self, num_bytes: int, *, is_thin: bool) -> bool:
        """Return whether a contribution may have this size; one that was begun before a worker sends less is whole."""
        return num_bytes == self.num_bytes or (is_thin and num_bytes == self.thin_bytes)

    def open(self, worker: str, num_bytes: int | None = None) -> memoryview:
        """Return memory for the next `num_bytes` of `worker`, which nothing else writes to."""
        if worker in self._pages or worker in self._images:  # whose memory may still be in use
            self.forget(worker)
        if self._packing is None and num_bytes in (None, self.num_bytes):
            return self.page(worker).lend()
        self._images[worker] = np.empty(num_bytes or self.num_bytes, np.uint8)
        return self._images[worker].data

    def is_packed(self, worker: str) -> bool:
        """Return whether the contribution of `worker` has to be unpacked when it is complete."""
        return worker in self._images

    def page(self, worker: str) -> Buffer:
        """Return the memory into which the contribution of `worker` arrives, or is unpacked."""
        page = self._pages.get(worker)
        if page is None:
            page = self._pages[worker] = self._pool.take()
        return page

    def take(self, worker: str) -> Buffer:
        """Return the contribution that has arrived from `worker`; return it to `reuse` afterwards."""
        if (packing := self._packing or self._thin) is not None and worker in self._images:
            packing.unpack(self._images.pop(worker), self.page(worker).flat)
        return self._pages.pop(worker)

    def reuse(self, page: Buffer) -> None:
        """Take back the memory of a merged contribution."""
        self._pool.put_back(page)

    def forget(self, worker: str) -> None:
        """Drop the arriving contribution of `worker`."""
        self._images.pop(worker, None)
        page = self._pages.pop(worker, None)
        if page is not None:
            self._pool.put_back(page)
