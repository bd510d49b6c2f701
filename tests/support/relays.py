"""A relay in a thread of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from evener.wire.identity import Address
from evener.wire.relay import Relay

KEY = "a key of a relay for tests"


@contextmanager
def relay_at(port: int = 0) -> Iterator[tuple[Address, list[str]]]:
    """The address of a relay, and what it tells its user."""
    told: list[str] = []
    begun: Future[tuple[Address, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        relay, is_over = Relay(KEY, told.append), asyncio.Event()
        bound = await relay.listen(Address("127.0.0.1", port))
        serving = asyncio.ensure_future(relay.serve())
        begun.set_result((bound, asyncio.get_running_loop(), is_over))
        await is_over.wait()
        serving.cancel()
        await asyncio.wait([serving])

    with ThreadPoolExecutor(1, "evener-test-relay") as pool:
        served = pool.submit(asyncio.run, serve())
        bound, loop, is_over = begun.result(10)
        try:
            yield bound, told
        finally:
            loop.call_soon_threadsafe(is_over.set)
            served.result(10)
