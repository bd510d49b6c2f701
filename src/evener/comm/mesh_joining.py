"""Connection of ranks in a mesh: each calls the ranks before it, and both prove that they know the secret.

They use the wire's handshake, so the secret is never sent; the process that starts a rank gives it the secret
(`signed_store`).
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack

from evener.comm.channel import Channel, read
from evener.comm.endpoints import endpoint_of, publish_endpoint
from evener.comm.mesh import Mesh
from evener.comm.peer_lines import is_unreachable
from evener.comm.signed_store import SignedStore
from evener.comm.waiting import slices
from evener.records.errors import LineCut, NodeLost
from evener.wire.errors import CannotJoin
from evener.wire.handshake import MESSAGE_BYTES, NONCE_BYTES, MasterHandshake, NodeHandshake
from evener.wire.identity import Token

_RANK = struct.Struct("<I")
_RANK_SECONDS = 5.0
"""Time in which a caller that has proved the secret sends its rank."""
_MAX_CALLERS = 64
"""Connections whose handshake is under way."""


def join_mesh(
    *,
    rank: int,
    nodes: Sequence[str],
    store: SignedStore,
    address: str,
    patience: float,
    longest_wait: float,
    connect_seconds: float | None = None,
) -> Mesh:
    """Connect this rank with all others; every rank calls this.

    Args:
        rank: of this process.
        nodes: name of every rank's node.
        store: rendezvous of the ranks, with their secret and the end of the wait.
        address: of this machine, at which the others reach it.
        patience: seconds within which all ranks have to join.
        longest_wait: timeout of a message in seconds, after that.
        connect_seconds: timeout of a connection to a rank that has joined; `patience` by default.

    Raises:
        LineCut: the machine of a rank that has joined does not answer.
        NodeLost: a rank cannot be reached within the patience, or the wait was ended.
    """
    token = Token(secret=store.secret, fingerprint=None)
    mesh = Mesh(rank=rank, nodes=nodes, peers={})
    with ExitStack() as undo, socket.create_server((address, 0), backlog=_MAX_CALLERS) as server:
        undo.callback(mesh.close)
        publish_endpoint(store, f"mesh/{rank}", address, server)
        for other in range(rank):
            mesh.peers[other] = _call(mesh, other, store, token, patience, connect_seconds or patience)
        _accept_later_ranks(mesh, server, store, token, patience)
        undo.pop_all()
    for peer in mesh.peers.values():
        peer.sock.settimeout(longest_wait)
    return mesh


def join_meshes(
    *,
    rank: int,
    nodes: Sequence[str],
    store: SignedStore,
    address: str,
    patience: float,
    longest_wait: float,
) -> tuple[Mesh, Mesh]:
    """Join the two meshes of a group, for small messages and for reports, which do not overtake each other."""
    with ExitStack() as undo:
        meshes = []
        for name in ("small", "reports"):
            mesh = join_mesh(
                rank=rank,
                nodes=nodes,
                store=store.under(name),
                address=address,
                patience=patience,
                longest_wait=longest_wait,
            )
            undo.callback(mesh.close)
            meshes.append(mesh)
        undo.pop_all()
    small, reports = meshes
    return small, reports


def _call(
    mesh: Mesh,
    other: int,
    store: SignedStore,
    token: Token,
    patience: float,
    connect_seconds: float,
) -> Channel:
    """Connect to `other`, perform the handshake, and send this rank."""
    host, port = endpoint_of(store, f"mesh/{other}", mesh.nodes[other])
    deadline = time.monotonic() + patience
    handshake = NodeHandshake(token, secrets.token_bytes(NONCE_BYTES), f"{host}, port {port}")
    message: bytes | None = handshake.hello()
    try:
        with ExitStack() as undo:
            peer = undo.enter_context(socket.create_connection((host, port), timeout=connect_seconds))
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while message is not None:
                peer.sendall(message)
                _await_readable([peer], store, deadline)
                message = handshake.answer(bytes(read(peer, MESSAGE_BYTES, deadline)))
            channel = Channel(peer, handshake.session_key(), is_caller=True)
            channel.send(_RANK.pack(mesh.rank))
            undo.pop_all()
    except OSError as error:
        kind = LineCut if is_unreachable(error) else NodeLost
        raise kind(
            f"node {mesh.nodes[mesh.rank]} cannot reach node {mesh.nodes[other]} (rank {other}) at {host}:{port}: "
            f"{error.strerror or error}; is the port open, and the address the right interface's?",
            (mesh.nodes[other],),
        ) from error
    except CannotJoin as error:
        raise NodeLost(
            f"node {mesh.nodes[mesh.rank]} was rejected by node {mesh.nodes[other]} (rank {other}) "
            f"at {host}:{port}: {error.rule}",
            (mesh.nodes[other],),
        ) from error
    return channel


def _await_readable(sockets: Collection[socket.socket], store: SignedStore, deadline: float) -> set[int]:
    """Return the numbers of the `sockets` that have data or a caller, once one has. Raises TimeoutError."""
    waiting = select.poll()  # select() knows no descriptor beyond 1023
    for one in sockets:
        waiting.register(one, select.POLLIN)
    for seconds in slices(deadline, store.is_over):
        if ready := waiting.poll(1000 * seconds):
            return {number for number, _ in ready}
    raise TimeoutError("timed out")


class _Caller:
    """A connection whose other end has not yet proved that it is a rank."""

    def __init__(self, sock: socket.socket, token: Token) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._handshake = MasterHandshake(token, secrets.token_bytes(NONCE_BYTES))
        self._received = b""

    def advance(self) -> tuple[int, Channel] | None:
        """Process what has arrived; return the rank and its connection once it has proved the secret.

        Raises:
            OSError, struct.error: the other end is no rank, or has closed the connection.
        """
        data = self.sock.recv(MESSAGE_BYTES - len(self._received))
        if not data:
            raise ConnectionError("the connection was closed")
        self._received += data
        if len(self._received) < MESSAGE_BYTES:
            return None
        reply = self._handshake.answer(self._received)
        self._received = b""
        self.sock.sendall(reply.message)
        if reply.refusal:
            raise ConnectionError(reply.refusal)
        if not reply.welcome:
            return None
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(self.sock, self._handshake.session_key(), is_caller=False)
        (rank,) = _RANK.unpack(channel.receive(time.monotonic() + _RANK_SECONDS))
        return int(rank), channel


def _accept_later_ranks(mesh: Mesh, server: socket.socket, store: SignedStore, token: Token, patience: float) -> None:
    """Accept all later ranks; each has to come within `patience` after the one before.

    All handshakes go on at the same time, so a caller that sends nothing delays no rank.
    """
    callers: list[_Caller] = []
    deadline = time.monotonic() + patience
    try:
        while len(mesh.peers) < mesh.size - 1:
            ready = _await_readable([server, *(one.sock for one in callers)], store, deadline)
            for caller in [one for one in callers if one.sock.fileno() in ready]:
                callers.remove(caller)
                rank, channel = _advanced(caller)
                if rank is not None and channel is not None and rank in range(mesh.rank + 1, mesh.size):
                    mesh.peers[rank] = channel
                    deadline = time.monotonic() + patience
                elif rank is None:
                    callers.append(caller)
                else:
                    caller.sock.close()
            if server.fileno() in ready:
                callers.append(_Caller(server.accept()[0], token))
            if len(callers) > _MAX_CALLERS:
                callers.pop(0).sock.close()  # it has sent nothing for the longest time
    except OSError as error:
        missing = [mesh.nodes[r] for r in range(mesh.rank + 1, mesh.size) if r not in mesh.peers]
        sentence = f"node {missing[0]} did not connect to node {mesh.nodes[mesh.rank]}: {error}"
        raise NodeLost(sentence, (missing[0],)) from error
    finally:
        for caller in callers:
            caller.sock.close()


def _advanced(caller: _Caller) -> tuple[int | None, Channel | None]:
    """Return rank and connection of a caller; None and None before its proof, -1 and None if it is no rank."""
    try:
        return caller.advance() or (None, None)
    except (OSError, struct.error):
        return -1, None
