"""A relay: it copies bytes between nodes and a master that cannot accept connections from outside their networks.

    master   opens a few connections and claims them (`relay_claim.py`); they wait
    node     opens a connection
    relay    joins it with one that waits, and copies bytes both ways; the master opens another one

A relay sees sizes and times. It cannot read or change what passes, since master and nodes encrypt and authenticate it
(`tls.py`, `handshake.py`); it can only delay it, or break a connection, after which the node connects again. Buffers
are limited, so a fast sender waits for a slow receiver. One master uses a relay at a time: the one that started last.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress

from evener.wire.errors import CannotListen
from evener.wire.identity import Address
from evener.wire.relay_claim import (
    ACCEPTED,
    CLAIM_BYTES,
    MAGIC,
    NAME_BYTES,
    NO_MASTER,
    NONCE_BYTES,
    OTHER_MASTER,
    PROOF_BYTES,
    is_proof,
    proof_of,
)
from evener.wire.transport import tune

_PIECE_BYTES = 64 * 1024
_FIRST_SECONDS, _LINE_SECONDS, _LAST_SECONDS = 5.0, 6.0, 2.0
"""Time of a connection to say what it is, of a node to wait for a master's line, and of a reply to a closed one."""
_MAX_LINES = 64
MAX_CONNECTIONS = 2048
_PATIENCE = 15.0


class _Line:
    """A master's connection that waits for a node."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.is_over = asyncio.Event()
        self.watching = asyncio.ensure_future(reader.read(1))

    async def is_alive(self) -> bool:
        """Stop watching; return whether the master has neither closed the line nor sent anything."""
        if self.watching.done():
            return False
        self.watching.cancel()
        with suppress(asyncio.CancelledError):
            await self.watching
        return not self.writer.is_closing()


class Relay:
    """A relay of one master.

    Args:
        key: That the master proves to know.
        notify: Called with a sentence for the user.
        most: Largest number of connections.
    """

    def __init__(self, key: str, notify: Callable[[str], None] = lambda _: None, most: int = MAX_CONNECTIONS) -> None:
        self._key, self._notify, self._most = key, notify, most
        self._lines: deque[_Line] = deque()
        self._has_line = asyncio.Event()
        self._master = b""
        self._held: Counter[bytes] = Counter()
        self._connections = 0
        self._tasks = set[asyncio.Task[None]]()
        self._server: asyncio.Server | None = None

    async def listen(self, address: Address) -> Address:
        """Listen at `address`; return the address with its real port.

        Raises:
            CannotListen: The address is taken, not of this machine, or a path.
        """
        if address.path:
            raise CannotListen("a relay listens at HOST:PORT, not at a path")
        host = None if address.is_everywhere else address.host
        try:
            self._server = await asyncio.start_server(self._accept, host, address.port, limit=_PIECE_BYTES)
        except OSError as error:
            reason = error.strerror or str(error)
            raise CannotListen(f"cannot listen at {address.description}: {reason}") from error
        return Address(address.host, self._server.sockets[0].getsockname()[1])

    async def serve(self) -> None:
        """Relay until this is cancelled."""
        assert self._server is not None
        try:
            await asyncio.Event().wait()
        finally:
            self._server.close()
            while self._tasks:
                for task in self._tasks:
                    task.cancel()
                await asyncio.wait(self._tasks)
            await asyncio.sleep(0)  # connections that were closed end in the next turn of the loop

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a new connection in a task, and close it afterwards, even if the relay ends before the task begins."""
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.close())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a new connection until it ends."""
        self._connections += 1
        try:
            if self._connections <= self._most:
                tune(writer.get_extra_info("socket"), _PATIENCE)
                async with asyncio.timeout(_FIRST_SECONDS):
                    first = await reader.readexactly(len(MAGIC))
                if first == MAGIC:
                    await self._on_master(reader, writer)
                else:
                    await self._on_node(first, reader, writer)
        except (OSError, EOFError):  # it has ended, or says nothing in time
            pass
        except asyncio.CancelledError:  # the relay ends; Python 3.11 would report this as an error
            pass
        finally:
            self._connections -= 1

    async def _on_master(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Check a claim; the line then waits until it is joined with a node, and is over."""
        async with asyncio.timeout(_FIRST_SECONDS):
            claim = MAGIC + await reader.readexactly(CLAIM_BYTES - len(MAGIC))
            nonce = secrets.token_bytes(NONCE_BYTES)
            writer.write(nonce + proof_of(self._key, b"relay", claim, nonce))
            proof = await reader.readexactly(PROOF_BYTES)
        if not is_proof(proof, self._key, b"master", claim, nonce):
            self._notify("turned away a master that does not know the key")
            return
        name = claim[len(MAGIC) : len(MAGIC) + NAME_BYTES]
        if name < self._master and self._held[self._master]:
            writer.write(OTHER_MASTER)
            return
        if name != self._master:
            self._notify("a master has connected")
            self._master = name
            for line in self._lines:
                line.is_over.set()
            self._lines.clear()
        if len(self._lines) == _MAX_LINES:
            return
        writer.write(ACCEPTED)
        line = _Line(reader, writer)
        self._lines.append(line)
        self._has_line.set()
        line.watching.add_done_callback(lambda _: self._on_ended(line))
        self._held[name] += 1
        try:
            await line.is_over.wait()
        finally:
            self._held[name] -= 1
            self._held = +self._held  # without masters that have no connections

    def _on_ended(self, line: _Line) -> None:
        """Forget a line that the master has closed."""
        if line in self._lines:
            self._lines.remove(line)
            line.is_over.set()

    async def _on_node(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Join a node with a line, and copy until one of them ends."""
        try:
            async with asyncio.timeout(_LINE_SECONDS):
                line = await self._take_line()
        except TimeoutError:
            writer.write(NO_MASTER)
            return
        try:
            line.writer.write(first)
            async with asyncio.TaskGroup() as tasks:
                copies = [
                    tasks.create_task(_copy(reader, line.writer)),
                    tasks.create_task(_copy(line.reader, writer)),
                ]
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait(copies, timeout=_LAST_SECONDS)
                for copy in copies:
                    copy.cancel()
        finally:
            line.is_over.set()

    async def _take_line(self) -> _Line:
        """Wait for a line of the master."""
        while True:
            while self._lines:
                line = self._lines.popleft()
                if await line.is_alive():
                    return line
                line.is_over.set()
            self._has_line.clear()
            await self._has_line.wait()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until the sender ends; wait for the receiver to take them."""
    with suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        await writer.drain()
