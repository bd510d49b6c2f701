"""A man in the middle of TCP connections: passes bytes on, and on demand cuts, freezes, delays, corrupts or repeats.

    with Proxy(("127.0.0.1", port)) as proxy:
        client = socket.create_connection(proxy.address)
        proxy.corrupt("up")

"up" is from who connected to the target, "down" the way back. A chunk is what one read of the proxy returns.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Literal, Self, TypeAlias

Direction: TypeAlias = Literal["up", "down"]
Address: TypeAlias = tuple[str, int]

_CHUNK_BYTES = 1 << 16
_CHUNKS_UNDERWAY = 256
_ANSWER_SECONDS = 5.0
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Listens on the loopback interface, in a thread of its own, for whoever wants to reach `target`.

    Attributes:
        address: to connect to.
        done: what was done to which bytes, in order.
    """

    def __init__(self, target: Address, seed: int = 0) -> None:
        self.done: list[str] = []
        self._target = target
        self._random = random.Random(seed)
        self._is_cut = False
        self._delay_seconds = 0.0
        self._flows = asyncio.Event()
        self._flows.set()
        self._ahead: dict[Direction, list[Callable[[bytes], bytes]]] = {"up": [], "down": []}
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")

    def __enter__(self) -> Self:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = listener.getsockname()
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._connect, sock=listener))
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Reset all connections, and whoever connects, until `join`."""
        self._is_cut = True
        self._run(self._break())

    def join(self) -> None:
        """Let connections through again."""
        self._is_cut = False

    def freeze(self) -> None:
        """Hold all bytes back, without a word to anybody, until `thaw`."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def thaw(self) -> None:
        """Let bytes through again, those that were held back first."""
        self._loop.call_soon_threadsafe(self._flows.set)

    def delay(self, seconds: float) -> None:
        """Pass on what comes from now on so much later."""
        self._delay_seconds = seconds

    def corrupt(self, direction: Direction) -> None:
        """Flip one bit, chosen by the seed, of the next chunk."""

        def flip(chunk: bytes) -> bytes:
            changed, bit = bytearray(chunk), self._random.randrange(8 * len(chunk))
            changed[bit // 8] ^= 1 << bit % 8
            self.done.append(f"flipped bit {bit} of {len(chunk)} bytes {direction}")
            return bytes(changed)

        self._ahead[direction].append(flip)

    def duplicate(self, direction: Direction) -> None:
        """Pass the next chunk on twice."""

        def repeat(chunk: bytes) -> bytes:
            self.done.append(f"repeated {len(chunk)} bytes {direction}")
            return chunk + chunk

        self._ahead[direction].append(repeat)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What `coroutine` returns in the proxy's thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_ANSWER_SECONDS)

    async def _end(self) -> None:
        self._server.close()
        await self._break()

    async def _break(self) -> None:
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connect(self, near_reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)
        ends = [near]
        try:
            if not self._is_cut:
                far_reader, far = await asyncio.open_connection(*self._target)
                ends.append(far)
                await self._lead(near_reader, near, far_reader, far)
        except* OSError as error:
            self.done.append(f"lost a connection: {error.exceptions[0]}")
        finally:
            for end in ends:  # whoever is still there is told by a reset
                _reset(end)

    async def _lead(
        self,
        near_reader: asyncio.StreamReader,
        near: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far: asyncio.StreamWriter,
    ) -> None:
        """Pass bytes on both ways until both have come to their end."""
        up: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS_UNDERWAY)
        down: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS_UNDERWAY)
        async with asyncio.TaskGroup() as ways:
            ways.create_task(self._take_in(near_reader, up, "up"))
            ways.create_task(self._pass_on(up, far))
            ways.create_task(self._take_in(far_reader, down, "down"))
            ways.create_task(self._pass_on(down, near))
        for end in (near, far):
            end.close()
            await end.wait_closed()

    async def _take_in(
        self, reader: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes]], direction: Direction
    ) -> None:
        chunk = b"before the first"
        while chunk:
            await self._flows.wait()
            chunk = await reader.read(_CHUNK_BYTES)
            while chunk and self._ahead[direction]:
                chunk = self._ahead[direction].pop(0)(chunk)
            await queue.put((self._loop.time() + self._delay_seconds, chunk))

    async def _pass_on(self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            due, chunk = await queue.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            await self._flows.wait()
            if not chunk:
                writer.write_eof()
                return
            writer.write(chunk)
            await writer.drain()


def _reset(end: asyncio.StreamWriter) -> None:
    """Close a connection, if it is open, so that the other side gets an error and not an end."""
    if not end.is_closing():
        end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    end.transport.abort()
