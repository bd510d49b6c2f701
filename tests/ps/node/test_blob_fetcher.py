"""Nodes pass pieces of a blob to each other; a node that is gone, silent or lies costs time, and changes no byte."""

from __future__ import annotations

import hashlib
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import pytest

from evener.ps.master.piece_holders import PieceHolders
from evener.ps.node import blob_fetcher, piece_exchange
from evener.ps.node.blob_fetcher import FIRST_BYTES, BlobFetcher
from evener.ps.node.blob_writer import BlobWriter
from evener.ps.node.piece_exchange import MAX_OPEN, PieceServer, Reads
from evener.ps.protocol.blob import MIN_PIECE_BYTES, Blob, whole_folder
from evener.ps.protocol.messages import BlobChunk, FetchBlob, FetchFrom, Header, Heartbeat, OfferPieces
from evener.records.errors import EvenerError, InvalidFile, MissingFile
from evener.system.awaited_files import await_files, await_no_files, wanted_file
from evener.wire.connect import open_connection
from evener.wire.connection import Connection
from evener.wire.errors import BadFrame, ConnectionLost, WrongSecret
from evener.wire.identity import Address, Token, make_identity
from support.refusals import refused

SECURITY = [False, True]
NUM_PIECES = 48
open_server = partial(PieceServer, "127.0.0.1", is_insecure=True)


@pytest.fixture
def blob(tmp_path: Path) -> Blob:
    """A blob of some files, one larger than a piece, and many that share one."""
    folder = tmp_path / "from"
    folder.mkdir()
    (folder / "large").write_bytes(bytes(range(256)) * (MIN_PIECE_BYTES // 256) * (NUM_PIECES - 1))
    for number in range(100):
        (folder / f"small-{number:02}").write_bytes(bytes([number]) * (MIN_PIECE_BYTES // 100))
    return Blob(folder, whole_folder(folder))


class Master:
    """A master that hands out pieces in the order of the requests, one at a time.

    Attributes:
        sent_bytes: bytes of pieces that it sent.
        num_referred: pieces for which it named another node.
        on_turn: called before every answer, with the number of answers so far.
        on_fetch: called with every request for a piece.
    """

    def __init__(self, blob: Blob) -> None:
        self.blob, self.holders, self.sent_bytes, self.num_referred = blob, PieceHolders(), 0, 0
        self.on_turn: Callable[[int], None] = lambda _: None
        self.on_fetch: Callable[[FetchBlob], None] = lambda _: None
        self._fetchers: dict[int, BlobFetcher] = {}
        self._requests: SimpleQueue[tuple[int, Header]] = SimpleQueue()

    def admit(self, folder: Path, serve: Callable[[Reads], PieceServer] | None = open_server) -> BlobFetcher:
        """Add a node."""
        peer = len(self._fetchers)
        fetcher = BlobFetcher(folder, lambda header: self._requests.put((peer, header)), serve)
        self._fetchers[peer] = fetcher
        return fetcher

    def serve(self, *fetchers: BlobFetcher, seconds: float = 20.0) -> None:
        """Answer requests until these nodes have everything."""
        self.serve_until(lambda: all(one.is_complete for one in fetchers), seconds)

    def serve_until(self, is_over: Callable[[], bool], seconds: float = 20.0) -> None:
        """Answer requests until a condition holds."""
        until, turn = time.monotonic() + seconds, 0
        while not is_over():
            assert time.monotonic() < until
            try:
                peer, header = self._requests.get(timeout=0.1)
            except Empty:
                continue
            self.on_turn(turn)
            turn += 1
            self._answer(peer, header)

    def _answer(self, peer: int, header: Header) -> None:
        if isinstance(header, OfferPieces):
            self.holders.offer(peer, header)
            return
        assert isinstance(header, FetchBlob)
        self.on_fetch(header)
        fetcher, total = self._fetchers[peer], self.blob.num_bytes
        if (where := self.holders.holder(peer, header, total)) is not None:
            self.num_referred += 1
            fetcher.fetch_from(where)
            return
        data = self.blob.read(header.offset, header.num_bytes)
        self.sent_bytes += len(data)
        fetcher.receive(BlobChunk(digest=header.digest, offset=header.offset, total=total), memoryview(data))


@contextmanager
def nodes(master: Master, folder: Path, names: str, **serve: Any) -> Iterator[list[BlobFetcher]]:
    with ExitStack() as stack:
        made = [master.admit(folder / name, serve.get(name, open_server)) for name in names]
        for one in made:
            stack.callback(one.close)
            one.request([master.blob.digest])
        yield made


def contents(fetcher: BlobFetcher, blob: Blob) -> dict[str, bytes]:
    folder = fetcher.path_of(blob.digest)
    return {name: (folder / name).read_bytes() for name in whole_folder(folder)}


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_fetcher, "SHARED_BYTES", 1)


@pytest.fixture
def expected(blob: Blob, tmp_path: Path) -> dict[str, bytes]:
    return {name: (tmp_path / "from" / name).read_bytes() for name in whole_folder(tmp_path / "from")}


@pytest.mark.parametrize("is_insecure", SECURITY)
def test_master_sends_each_piece_once(
    blob: Blob, tmp_path: Path, expected: dict[str, bytes], is_insecure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_fetcher, "_SLOW", 1e9)  # the master is a function here
    master, serve = Master(blob), partial(PieceServer, "127.0.0.1", is_insecure=is_insecure)
    with nodes(master, tmp_path, "abc", a=serve, b=serve, c=serve) as made:
        master.serve(*made)
        for one in made:
            assert contents(one, blob) == expected
    assert master.sent_bytes <= blob.num_bytes + len(made) * FIRST_BYTES


def test_nodes_serve_a_blob_of_an_earlier_run(
    blob: Blob, tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_fetcher, "_SLOW", 1e9)  # the master is a function here
    first, heads = Master(blob), 4 * FIRST_BYTES
    with nodes(first, tmp_path, "ab") as made:
        first.serve(*made)
    second = Master(blob)
    with nodes(second, tmp_path, "ab") as made:
        assert not any(one.is_complete for one in made)  # they fetch the head
        second.serve(*made)
        with nodes(second, tmp_path, "c") as (late,):
            second.serve(late)
            assert contents(late, blob) == expected
    assert second.sent_bytes <= heads
    assert contents(made[0], blob) == expected  # it stays when its part ends
    alone = Master(blob)
    with nodes(alone, tmp_path, "a", a=None) as (one,):
        assert one.is_complete
    assert alone.sent_bytes == 0


def test_complete_blob_that_the_master_has_no_more_is_used(
    blob: Blob, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    master = Master(blob)
    with nodes(master, tmp_path, "a") as (one,):
        master.serve(one)
    with nodes(master, tmp_path, "a") as (one,):
        assert not one.can_begin
        one.receive(BlobChunk(digest=blob.digest, offset=0, total=0), memoryview(b""))
        assert one.can_begin
        assert contents(one, blob) == expected


def test_complete_blob_that_was_damaged_since_costs_only_time(
    blob: Blob, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    master = Master(blob)
    with nodes(master, tmp_path, "a") as (one,):
        master.serve(one)
        folder = one.path_of(blob.digest)
    (folder / "small-07").write_bytes(b"else")
    (folder / "large").write_bytes(b"short")
    with nodes(master, tmp_path, "a") as (one,):
        master.serve(one)
        with nodes(master, tmp_path, "b") as (other,):
            master.serve(other)
            assert contents(other, blob) == expected


def test_holders_of_complete_blobs_take_turns_and_are_forgotten() -> None:
    holders, token = PieceHolders(), make_identity(insecure=True).token.text
    digest, twice = "a" * 64, ("a" * 64, "a" * 64)
    for peer, complete in ((1, (digest,)), (2, twice), (3, ())):
        holders.offer(peer, OfferPieces(address=f"10.0.0.{peer}:7000", token=token, complete=complete))

    def found(digest: str) -> set[str]:
        fetches = [FetchBlob(digest=digest, offset=MIN_PIECE_BYTES * n, num_bytes=MIN_PIECE_BYTES) for n in range(12)]
        answers = [holders.holder(3, fetch, 16 * MIN_PIECE_BYTES) for fetch in fetches]
        return {where.address for where in answers if where is not None}

    assert found(digest) == {"10.0.0.1:7000", "10.0.0.2:7000"}
    assert not found("b" * 64)
    holders.disconnected(2)
    assert found(digest) == {"10.0.0.1:7000"}
    holders.disconnected(1)
    assert not found(digest)
    assert not holders._complete


def test_node_that_listens_nowhere_gets_everything_from_the_master(
    blob: Blob, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    def fail(_: Reads) -> PieceServer:
        raise InvalidFile("no")

    master = Master(blob)
    with nodes(master, tmp_path, "abc", b=None, c=fail) as made:
        master.serve(*made)
        assert [contents(one, blob) == expected for one in made] == [True] * 3
    assert master.sent_bytes >= 3 * blob.num_bytes


def test_short_blob_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_fetcher, "SHARED_BYTES", 2**25)
    (tmp_path / "task.py").write_bytes(b"x = 1\n")
    master = Master(Blob(tmp_path, ["task.py"]))
    with nodes(master, tmp_path, "a") as (one,):
        master.serve(one)
        assert contents(one, master.blob) == {"task.py": b"x = 1\n"}
        assert not master.holders._offers


def lying(reads: Reads) -> PieceServer:
    """A node that sends other bytes."""
    return open_server(lambda fetch: None if (piece := reads(fetch)) is None else (piece[0], b"lie" + piece[1][3:]))


def empty(_: Reads) -> PieceServer:
    """A node that says that it has nothing."""
    return open_server(lambda fetch: (BlobChunk(digest=fetch.digest, offset=fetch.offset, total=0), b""))


def silent(_: Reads) -> PieceServer:
    """A node that sends heartbeats and no piece."""
    return open_server(lambda _: None)


def another(reads: Reads) -> PieceServer:
    """A node that sends pieces that were not requested."""

    def read(fetch: FetchBlob) -> Any:
        piece = reads(fetch)
        return None if piece is None else (BlobChunk(digest="0" * 64, offset=fetch.offset, total=1), piece[1])

    return open_server(read)


class Unreachable:
    """An offer at which nothing listens."""

    def __init__(self, _: Reads) -> None:
        self.offer = OfferPieces(address="127.0.0.1:9", token=make_identity(insecure=True).token.text)

    def close(self) -> None:
        """Do nothing."""


def with_another_token(reads: Reads) -> Any:
    """A node whose offer has a token that its server does not accept."""
    server = open_server(reads)
    server.offer = OfferPieces(address=server.offer.address, token=make_identity(insecure=True).token.text)
    return server


@pytest.mark.parametrize("bad", [lying, empty, silent, another, Unreachable, with_another_token])
def test_bad_node_costs_only_time(
    bad: Any, blob: Blob, tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piece_exchange, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(piece_exchange, "_BEAT_SECONDS", 0.1)
    master = Master(blob)
    with nodes(master, tmp_path, "abc", a=bad) as made:
        master.serve(*made)
        assert [contents(one, blob) == expected for one in made] == [True] * 3


def test_others_continue_when_a_node_leaves(blob: Blob, tmp_path: Path, expected: dict[str, bytes]) -> None:
    master = Master(blob)
    with nodes(master, tmp_path, "abc") as made:
        gone, *rest = made

        def leave(turn: int) -> None:
            if turn == 20:
                gone.close()
                master.holders.disconnected(0)

        master.on_turn = leave
        master.serve(*rest)
        assert [contents(one, blob) == expected for one in rest] == [True] * 2


def test_requests_are_repeated_over_a_new_connection(blob: Blob, tmp_path: Path, expected: dict[str, bytes]) -> None:
    master = Master(blob)
    with nodes(master, tmp_path, "ab") as made:

        def lose(turn: int) -> None:
            if turn % 7 == 3:
                while not master._requests.empty():
                    master._requests.get()
                for one in made:
                    one.resume()

        master.on_turn = lose
        master.serve(*made)
        assert [contents(one, blob) == expected for one in made] == [True] * 2


def test_slow_node_is_spared_the_last_pieces(blob: Blob, tmp_path: Path, expected: dict[str, bytes]) -> None:
    served = []

    def slow(reads: Reads) -> PieceServer:
        def read(fetch: FetchBlob) -> Any:
            time.sleep(0.3)
            served.append(fetch.offset)
            return reads(fetch)

        return open_server(read)

    master = Master(blob)
    with nodes(master, tmp_path, "ab", a=slow) as made:
        master.serve(*made)
        assert [contents(one, blob) == expected for one in made] == [True] * 2
    assert len(served) < master.num_referred


def test_piece_that_cannot_be_written_ends_the_transfer(
    blob: Blob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    master = Master(blob)
    with nodes(master, tmp_path, "ab") as made:

        def fill_disk(turn: int) -> None:
            if turn == 25:
                monkeypatch.setattr("evener.ps.protocol.blob.FileRange.write", write)

        master.on_turn = fill_disk
        with pytest.raises(OSError, match="No space"):
            master.serve(*made)


@pytest.mark.parametrize("total", [0, 1])
def test_blob_that_is_gone_or_shorter_than_its_head_ends_the_transfer(total: int, blob: Blob, tmp_path: Path) -> None:
    fetcher = BlobFetcher(tmp_path / "a", lambda _: None)
    fetcher.request([blob.digest])
    with refused(InvalidFile if total else MissingFile):
        fetcher.receive(BlobChunk(digest=blob.digest, offset=0, total=total), memoryview(b""))
    fetcher.close()


@contextmanager
def connected(server: PieceServer, **words: Any) -> Iterator[Connection[Any]]:
    token = words.get("token", Token.parse(server.offer.token))
    connection: Connection[Any] = open_connection(Address.parse(server.offer.address), token, BlobChunk | Heartbeat)
    with connection:
        yield connection


@pytest.mark.parametrize("is_insecure", SECURITY)
def test_server_of_pieces_gives_strangers_nothing(blob: Blob, tmp_path: Path, is_insecure: bool) -> None:
    master, opened = Master(blob), list[PieceServer]()

    def serve(reads: Reads) -> PieceServer:
        opened.append(PieceServer("127.0.0.1", reads, is_insecure=is_insecure))
        return opened[0]

    with nodes(master, tmp_path, "a", a=serve) as (one,):
        master.serve(one)
        (server,) = opened
        right = Token.parse(server.offer.token)
        with (
            pytest.raises(WrongSecret),
            connected(server, token=Token(secret=bytes(16), fingerprint=right.fingerprint)),
        ):
            pass
        for digest, offset in (("0" * 64, 0), (blob.digest, 0), (blob.digest, 1), (blob.digest, 2**62)):
            with connected(server) as connection:
                connection.send(FetchBlob(digest=digest, offset=offset))
                frame = connection.receive()
                assert (frame.header.total, [bytes(one) for one in frame.buffers]) == (0, [b""])


def test_too_many_requests_close_the_connection() -> None:
    server = open_server(lambda _: None)
    with connected(server) as connection:
        for number in range(MAX_OPEN + 1):
            connection.send(FetchBlob(digest="0" * 64, offset=number))
        with pytest.raises(ConnectionLost):
            connection.receive()
    server.close()


@pytest.mark.parametrize(
    "address",
    [
        "unix:/tmp/x",
        ":7000",
        "0.0.0.0:7000",
        "[::]:7000",
        "host",
        "10.0.0.1:0",
        "10.0.0.1:99999",
        "",
        "8.8.8.8:22",
        "localhost:6379",
        "host:7000",
        "224.0.0.1:7000",
    ],
)
def test_offer_that_leads_nowhere_is_refused(address: str) -> None:
    token = make_identity(insecure=True).token.text
    with pytest.raises(BadFrame):
        PieceHolders().offer(1, OfferPieces(address=address, token=token))
    with pytest.raises(BadFrame):
        PieceHolders().offer(1, OfferPieces(address="10.0.0.1:7000", token=token[:-1]))


@pytest.mark.parametrize(
    ("address", "origin", "counts"),
    [
        ("127.0.0.1:6379", "10.0.0.9", False),
        ("[::1]:6379", "10.0.0.9", False),
        ("127.0.0.1:6379", "127.0.0.1", True),
        ("127.0.0.1:6379", "", True),
        ("8.8.8.8:7000", "8.8.8.8", True),
        ("192.168.1.7:7000", "8.8.8.8", True),
    ],
)
def test_offer_counts_where_others_may_connect(address: str, origin: str, counts: bool) -> None:
    holders, token = PieceHolders(), make_identity(insecure=True).token.text
    holders.offer(1, OfferPieces(address=address, token=token), origin)
    holders.offer(2, OfferPieces(address="10.0.0.2:7000", token=token))
    fetch = FetchBlob(digest="0" * 64, offset=0)
    assert holders.holder(1, fetch, 10 * MIN_PIECE_BYTES) is None
    assert (holders.holder(2, fetch, 10 * MIN_PIECE_BYTES) is not None) == counts


def test_node_that_was_sent_less_than_a_piece_is_not_named() -> None:
    holders, token = PieceHolders(), make_identity(insecure=True).token.text
    for peer in (1, 2):
        holders.offer(peer, OfferPieces(address=f"10.0.0.{peer}:7000", token=token))
    byte, piece = (FetchBlob(digest="0" * 64, offset=0, num_bytes=count) for count in (1, MIN_PIECE_BYTES))
    assert holders.holder(1, byte, 10 * MIN_PIECE_BYTES) is None
    assert holders.holder(2, piece, 10 * MIN_PIECE_BYTES) is None
    assert holders.holder(1, piece, 10 * MIN_PIECE_BYTES) is not None


def test_master_names_only_nodes_that_have_the_piece() -> None:
    holders, token = PieceHolders(), make_identity(insecure=True).token.text
    offers = {peer: OfferPieces(address=f"10.0.0.{peer}:7000", token=token) for peer in (1, 2, 3)}
    for peer, offer in offers.items():
        holders.offer(peer, offer)
    total, digest = 10 * MIN_PIECE_BYTES, "0" * 64

    def asked(peer: int, offset: int, is_direct: bool = False) -> str | None:
        found = holders.holder(peer, FetchBlob(digest=digest, offset=offset, is_direct=is_direct), total)
        return None if found is None else found.address

    assert asked(1, 0) is None
    assert asked(1, 0) is None
    assert asked(2, 0) == "10.0.0.1:7000"
    assert asked(4, 0) is None  # it serves nothing, so it gets everything from the master
    assert asked(2, MIN_PIECE_BYTES) is None
    assert asked(3, MIN_PIECE_BYTES) == "10.0.0.2:7000"
    assert asked(3, 0, is_direct=True) is None
    holders.disconnected(2)
    assert asked(3, MIN_PIECE_BYTES) is None
    assert asked(1, MIN_PIECE_BYTES) == "10.0.0.3:7000"
    holders.offer(1, offers[1])  # in another run: what it was sent may be gone
    assert asked(3, 0) is None
    assert asked(1, 0) == "10.0.0.3:7000"
    for offset in (total, 2**62):
        assert asked(1, offset) is None
    for number in range(100):
        holders.holder(1, FetchBlob(digest=f"{number:064x}", offset=0), total)
    assert len(holders._sent) <= 8


def test_piece_from_elsewhere_that_was_not_requested_is_ignored(blob: Blob, tmp_path: Path) -> None:
    fetcher = BlobFetcher(tmp_path / "a", lambda _: None)
    where = FetchFrom(digest=blob.digest, offset=0, address="127.0.0.1:9", token="")
    fetcher.fetch_from(where)
    fetcher.request([blob.digest])
    fetcher.fetch_from(where)
    assert not fetcher._holders
    fetcher.close()
    with pytest.raises(EvenerError):
        Token.parse("")


def test_early_blob_can_begin_with_its_head_and_fetches_first_what_is_opened(
    blob: Blob, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    master, small = Master(blob), [f"small-{number:02}" for number in (7, 93, 41)]
    fetcher = master.admit(tmp_path / "a", None)
    fetcher.request([blob.digest], early=blob.digest)
    found: dict[str, bytes] = {}

    def read() -> None:
        for name in small:
            found[name] = (folder / name).read_bytes()

    order: list[int] = []
    master.on_fetch = lambda fetch: order.append(fetch.offset)
    try:
        master.serve_until(lambda: fetcher.can_begin)
        assert not fetcher.is_complete
        folder = fetcher.folder_of(blob.digest)
        assert {name: (folder / name).stat().st_size for name in whole_folder(folder)} == {
            name: len(content) for name, content in expected.items()
        }
        await_files(folder)
        reader = threading.Thread(target=read)
        order.clear()
        master.on_turn = lambda _: time.sleep(0.02)  # time for a busy machine to notice a request
        reader.start()
        master.serve_until(lambda: len(found) == len(small))
        master.on_turn = lambda _: None
        assert found == {name: expected[name] for name in small}
        assert len(order) < NUM_PIECES / 3  # at most a few of others before each
        master.serve(fetcher)
        reader.join()
        assert fetcher.folder_of(blob.digest) == folder  # where it stays while it is read
        assert not wanted_file(folder).exists()
        assert {name: (folder / name).read_bytes() for name in expected} == expected
    finally:
        await_no_files(fetcher.folder_of(blob.digest))
        fetcher.close()
    assert contents(fetcher, blob) == expected
    assert [path.name for path in (tmp_path / "a").iterdir()] == [blob.digest]


def test_early_blob_that_is_not_complete_at_the_end_leaves_nothing(blob: Blob, tmp_path: Path) -> None:
    master = Master(blob)
    fetcher = master.admit(tmp_path / "a", None)
    fetcher.request([blob.digest], early=blob.digest)
    master.serve_until(lambda: fetcher.can_begin)
    fetcher.close()
    assert list((tmp_path / "a").iterdir()) == []


def fetch_in_part(blob: Blob, cache: Path, *, is_early: bool) -> int:
    """Fetch a third of the pieces in a run that ends then; return the bytes that the master sent."""
    master = Master(blob)
    fetcher = master.admit(cache, None)
    fetcher.request([blob.digest], early=blob.digest if is_early else "")
    master.serve_until(lambda: master.sent_bytes > blob.num_bytes / 3)
    fetcher.close()
    return master.sent_bytes


def fetch_all(blob: Blob, cache: Path, *, is_early: bool = False) -> tuple[int, dict[str, bytes]]:
    """Fetch the blob; return the bytes that the master sent, and the files."""
    master = Master(blob)
    fetcher = master.admit(cache, None)
    fetcher.request([blob.digest], early=blob.digest if is_early else "")
    master.serve(fetcher)
    fetcher.close()
    return master.sent_bytes, contents(fetcher, blob)


@pytest.mark.parametrize("was_early", [False, True])
@pytest.mark.parametrize("is_early", [False, True])
def test_pieces_of_a_run_that_ended_are_not_fetched_again(
    blob: Blob, tmp_path: Path, expected: dict[str, bytes], was_early: bool, is_early: bool
) -> None:
    received = 0
    for _ in range(2):
        Master(blob).admit(tmp_path / "a", None).close()  # a run that ends at once changes nothing
        received += fetch_in_part(blob, tmp_path / "a", is_early=was_early) - FIRST_BYTES
        assert [path.name for path in (tmp_path / "a").iterdir()] == [f"{blob.digest}.part"]
    sent, files = fetch_all(blob, tmp_path / "a", is_early=is_early)
    assert files == expected
    assert sent <= blob.num_bytes - received + FIRST_BYTES
    assert [path.name for path in (tmp_path / "a").iterdir()] == [blob.digest]


@pytest.mark.parametrize("change", ["removed", "shorter", "longer", "other", "list", "range"])
@pytest.mark.parametrize("was_early", [False, True])
def test_pieces_that_were_changed_since_are_fetched_again(
    blob: Blob, tmp_path: Path, expected: dict[str, bytes], change: str, was_early: bool
) -> None:
    fetch_in_part(blob, tmp_path / "a", is_early=was_early)
    part = tmp_path / "a" / f"{blob.digest}.part"
    large = part / "files" / "large"
    if change == "removed":
        large.unlink()
    elif change == "list":
        (part / "missing").write_bytes(b"")
    elif change == "range":
        (part / "missing").write_bytes(msgspec.msgpack.encode([0, NUM_PIECES + 1]))
    else:
        contents = {"shorter": b"", "longer": expected["large"] * 2, "other": bytes(len(expected["large"]))}
        large.write_bytes(contents[change])
    sent, files = fetch_all(blob, tmp_path / "a")
    assert files == expected
    assert change in ("longer", "range") or sent >= blob.num_bytes - 2 * MIN_PIECE_BYTES


def test_two_processes_that_keep_pieces_leave_one_part(blob: Blob, tmp_path: Path, expected: dict[str, bytes]) -> None:
    master = Master(blob)
    both = [master.admit(tmp_path / "a", None) for _ in range(2)]
    for one in both:
        one.request([blob.digest])
    master.serve_until(lambda: master.sent_bytes > blob.num_bytes / 2)
    for one in both:
        one.close()
    assert [path.name for path in (tmp_path / "a").iterdir()] == [f"{blob.digest}.part"]
    assert fetch_all(blob, tmp_path / "a")[1] == expected


def test_pieces_are_not_kept_on_a_full_disk(blob: Blob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    master = Master(blob)
    fetcher = master.admit(tmp_path / "a", None)
    fetcher.request([blob.digest])
    master.serve_until(lambda: master.sent_bytes > blob.num_bytes / 3)
    monkeypatch.setattr("evener.ps.protocol.blob.FileRange.write", write)
    with pytest.raises(OSError, match="No space"):
        master.serve(fetcher)
    fetcher.close()
    assert list((tmp_path / "a").iterdir()) == []


def test_early_blob_comes_last_and_pieces_of_it_from_other_nodes(
    blob: Blob, tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_fetcher, "_SLOW", 1e9)
    master = Master(blob)
    made = [master.admit(tmp_path / name) for name in "abc"]
    readers = []
    try:
        for one in made:
            one.request([blob.digest], early=blob.digest)
        master.serve_until(lambda: all(one.can_begin for one in made))
        for one in made:
            folder = one.folder_of(blob.digest)
            await_files(folder)
            files = [folder / name for name in expected]
            readers.append(threading.Thread(target=lambda files=files: [file.read_bytes() for file in files[::-1]]))
            readers[-1].start()
        master.serve(*made)
        for reader in readers:
            reader.join()
    finally:
        for one in made:
            await_no_files(one.folder_of(blob.digest))
            one.close()
    assert [contents(one, blob) == expected for one in made] == [True] * 3
    assert master.num_referred > NUM_PIECES


def test_list_of_files_in_another_order_is_not_read_early(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(b"x")
    listing = msgspec.msgpack.encode([("b", 1), ("a", 1)])
    hashed = hashlib.sha256(b"xx").digest()
    head = struct.pack("<QQ", len(listing), 2) + hashed + listing
    writer = BlobWriter(hashlib.sha256(head).hexdigest(), tmp_path / "to", is_early=True)
    writer.add_head(head)
    assert not writer.is_early
    writer.add(0, b"xx")
    assert (writer.finish() / "a").read_bytes() == b"x"
    writer.close()


def test_process_that_waits_for_a_file_gets_an_error_when_the_run_ends(blob: Blob, tmp_path: Path) -> None:
    master, raised = Master(blob), list[Exception]()
    fetcher = master.admit(tmp_path / "a", None)
    fetcher.request([blob.digest], early=blob.digest)
    master.serve_until(lambda: fetcher.can_begin)
    folder = fetcher.folder_of(blob.digest)
    await_files(folder)

    def read() -> None:
        try:
            (folder / "small-50").read_bytes()
        except MissingFile as error:
            raised.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    while not wanted_file(folder).stat().st_size:
        time.sleep(0.01)
    fetcher.close()
    reader.join()
    await_no_files(folder)
    assert len(raised) == 1
    assert list((tmp_path / "a").iterdir()) == []


def test_urgent_piece_at_a_silent_node_comes_from_the_master(
    blob: Blob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_fetcher, "_URGENT_SECONDS", 0.2)
    master = Master(blob)
    first = master.admit(tmp_path / "a", silent)
    first.request([blob.digest])
    master.serve(first)  # the master names it for every piece from now on
    second = master.admit(tmp_path / "b")
    second.request([blob.digest], early=blob.digest)
    master.serve_until(lambda: second.can_begin)
    folder = second.folder_of(blob.digest)
    await_files(folder)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append((folder / "small-50").read_bytes()))
    reader.start()
    began = time.monotonic()
    master.serve_until(lambda: bool(found))
    assert time.monotonic() - began < 5
    reader.join()
    await_no_files(folder)
    for one in (first, second):
        one.close()


def test_run_ends_while_a_message_to_the_master_waits(blob: Blob, tmp_path: Path) -> None:
    master, returns = Master(blob), threading.Event()
    with nodes(master, tmp_path, "a") as (first,):
        master.serve(first)
        second = master.admit(tmp_path / "b")
        send = second._send
        second.request([blob.digest])
        master.serve_until(lambda: master.num_referred > 3)

        def wait(header: Header) -> None:  # as while a lost master is called again
            returns.wait()
            send(header)

        second._send = wait
        time.sleep(0.3)
        began = time.monotonic()
        second.close()
        assert time.monotonic() - began < 2
        returns.set()


def test_pieces_are_fetched_from_a_bounded_number_of_nodes(
    blob: Blob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_fetcher, "_MAX_HOLDERS", 2)
    fetcher = BlobFetcher(tmp_path / "a", lambda _: None)
    fetcher.request([blob.digest])
    fetcher.receive(
        BlobChunk(digest=blob.digest, offset=0, total=blob.num_bytes), memoryview(blob.read(0, FIRST_BYTES))
    )
    server = silent(lambda _: None)
    for number, piece in enumerate(list(fetcher._requested)[:4]):
        where = FetchFrom(
            digest=blob.digest,
            offset=fetcher._writer.head.offset_of(piece),
            address=server.offer.address.replace("127.0.0.1", f"127.0.0.{number + 1}"),
            token=server.offer.token,
        )
        fetcher.fetch_from(where)
    assert len(fetcher._holders) <= 2
    fetcher.close()
    server.close()
