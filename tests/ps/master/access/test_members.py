"""Who may do what: roles by token, names by key, expulsion for good."""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from evener.commands.join import connector
from evener.ps.client import MasterClient, find_master
from evener.ps.master.access.members import MAX_MEMBERS, Member, MemberList, Members
from evener.ps.protocol import messages as m
from evener.ps.protocol.config import Beacon, StateDir
from evener.ps.protocol.directions import ToCommand, ToMaster, ToNode
from evener.ps.protocol.job import encode_job
from evener.ps.protocol.messages import ExpelNode, ForgetNode
from evener.records.errors import InvalidFile, InvalidInput
from evener.records.schema import write_noun
from evener.wire.connect import open_connection
from evener.wire.connection import Connection
from evener.wire.errors import NothingListens, WrongSecret
from evener.wire.identity import ROLES, Address, Role, make_identity
from evener.wire.limits import Limits
from evener.wire.server import Server
from evener.wire.server_events import PeerRefused
from support.agreements import SYNC
from support.linear_engine import job, weights
from support.master_in_threads import Plane, plane, wait_until
from support.refusals import refused
from support.strangers import introduction, log_of, told_until_closed

KEY, OTHER = "1" * 64, "2" * 64


def with_role(ps: Plane, role: Role) -> Connection[m.Header]:
    return open_connection(ps.address, ps.identity.token_of(role), ToNode | ToCommand, Limits(patience=5))


NOT_ALLOWED: list[tuple[Role, m.Header, list[Any]]] = [
    ("node", m.SubmitRun(), [encode_job(job(SYNC)), weights().memory]),
    ("node", m.StopRun(run="linear-1"), []),
    ("node", m.WatchRun(run="linear-1"), []),
    ("node", m.GetStatus(), []),
    ("node", m.ShutDown(), []),
    ("node", m.ExpelNode(name="a"), []),
    ("submitter", m.ShutDown(), []),
    ("submitter", m.ExpelNode(name="a"), []),
    ("submitter", m.ForgetNode(name="a"), []),
    ("submitter", introduction("a"), []),
]


@pytest.mark.parametrize(("role", "header", "buffers"), NOT_ALLOWED, ids=lambda one: getattr(type(one), "__name__", ""))
def test_token_permits_only_the_requests_of_its_role(role: Role, header: m.Header, buffers: list[Any]) -> None:
    with plane("a") as ps, with_role(ps, role) as connection:
        connection.send(header, buffers)
        told_until_closed(connection)
        wait_until(lambda: f"the token of a {role} does not allow {type(header).__name__}" in log_of(ps)[-1]["detail"])
        assert ps.ask().nodes[0].state == "present"


def test_submitter_token_submits_runs_and_node_token_joins() -> None:
    with plane() as ps:
        own, ps.identity = ps.identity, ps.identity
        with with_role(ps, "node") as node:
            node.send(introduction("n", profiled=True))
            assert isinstance(next_header(node), m.Welcome)
            with MasterClient(ps.address, own.token_of("submitter"), 5.0) as client:
                assert [one.name for one in client.ask().nodes] == ["n"]
                assert client.submit(job(SYNC), weights(), []) == "linear-1"
            node.send(m.Leave())


def test_token_rotation_invalidates_all_tokens_of_a_master() -> None:
    identity = make_identity(insecure=True)
    rotated = identity.rotated()
    texts = {one.token_of(role).text for one in (identity, rotated) for role in ROLES}
    assert len(texts) == 6
    assert (rotated.certificate, rotated.key) == (identity.certificate, identity.key)
    with plane() as ps, pytest.raises(WrongSecret):
        open_connection(ps.address, rotated.token_of("node"), ToNode, Limits(patience=5))


def joined(connection: Connection[m.Header], **words: Any) -> m.Header:
    connection.send(replace(introduction("attic", profiled=True), **words))
    return next_header(connection)


def next_header(connection: Connection[m.Header]) -> m.Header:
    while isinstance(header := connection.receive().header, m.Heartbeat):
        pass
    return header


def test_node_name_belongs_to_the_first_key_that_joined_with_it() -> None:
    with plane(patience=1) as ps, with_role(ps, "node") as own, with_role(ps, "node") as thief:
        assert isinstance(joined(own, key=KEY), m.Welcome)
        told = joined(thief, key=OTHER, incarnation=99)
        assert isinstance(told, m.Dismiss)
        assert "the name attic belongs to another node: choose another name with --name" in told.reason
        with with_role(ps, "node") as without:
            assert isinstance(joined(without, incarnation=99), m.Dismiss)
        with with_role(ps, "node") as again:
            assert isinstance(joined(again, key=KEY, incarnation=2), m.Welcome)
            again.send(m.Leave())
        ps.stop_master()
        ps.start_master()
        with with_role(ps, "node") as later:
            assert isinstance(joined(later, key=OTHER, incarnation=99), m.Dismiss)
        with MasterClient(ps.address, ps.identity.token, 5.0) as admin:
            admin.change(ForgetNode(name="attic"))
        with with_role(ps, "node") as heir:
            assert isinstance(joined(heir, key=OTHER, incarnation=99), m.Welcome)
            heir.send(m.Leave())


def test_duplicate_default_name_gets_a_number() -> None:
    with plane(patience=1) as ps, with_role(ps, "node") as one, with_role(ps, "node") as other:
        assert isinstance(joined(one, key=KEY, is_named=False), m.Welcome)
        told = joined(other, key=OTHER, is_named=False)
        assert isinstance(told, m.Welcome)
        assert told.name == "attic-2"
        assert [node.name for node in ps.ask().nodes] == ["attic", "attic-2"]
        for connection in (one, other):
            connection.send(m.Leave())


def test_expelled_node_cannot_rejoin_by_any_name_after_a_restart() -> None:
    with plane(patience=1) as ps, with_role(ps, "node") as bad:
        assert isinstance(joined(bad, key=KEY), m.Welcome)
        with MasterClient(ps.address, ps.identity.token, 5.0) as admin:
            assert [node.state for node in admin.change(ExpelNode(name="attic")).nodes] == ["left"]
        told = told_until_closed(bad)
        assert any(isinstance(header, m.Dismiss) and "expelled: by an admin" in header.reason for header in told)
        ps.stop_master()
        ps.start_master()
        for words in ({"key": KEY}, {"key": OTHER}, {"key": KEY, "name": "cellar"}):
            with with_role(ps, "node") as again:
                told_again = joined(again, **words)
                assert isinstance(told_again, m.Dismiss)
                assert "it was expelled" in told_again.reason
        assert [line["what"] for line in log_of(ps)].count("expelled") == 1


def test_expulsion_removes_all_names_of_a_key() -> None:
    with plane(patience=1) as ps, with_role(ps, "node") as bad, with_role(ps, "node") as twin:
        for connection, name in ((bad, "attic"), (twin, "attic-2")):
            assert isinstance(joined(connection, key=KEY, name=name), m.Welcome)
        with MasterClient(ps.address, ps.identity.token, 5.0) as admin:
            assert [node.state for node in admin.change(ExpelNode(name="attic")).nodes] == ["left", "left"]
        assert any(isinstance(header, m.Dismiss) for header in told_until_closed(twin))


def test_expelling_an_unknown_node_raises_invalid_input() -> None:
    with (
        plane() as ps,
        MasterClient(ps.address, ps.identity.token, 5.0) as admin,
        refused(InvalidInput),
    ):
        admin.change(ExpelNode(name="nobody"))


def test_damaged_members_file_raises_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    for content in (b"?", b"[" * 100_000, b'{"version": 1, "members": {"a": {"key": "zz"}}}', b"\xff"):
        path.write_bytes(content)
        with refused(InvalidFile):
            Members(path).load()


def test_nodes_survive_an_impostor_on_the_port_of_a_killed_master() -> None:
    with plane("a", patience=2) as ps:
        ps.stop_master()
        impostor: Server[m.Header] = Server(ToMaster, make_identity(insecure=True))
        impostor.listen(ps.address)
        refused = 0
        while refused < 3:
            refused += sum(isinstance(event, PeerRefused) for event in impostor.poll(0.05))
        impostor.close()
        ps.start_master()
        wait_until(lambda: any(node.name == "a" and node.state == "present" for node in ps.ask().nodes))
        assert ps.nodes[0].error is None


def test_connector_tries_all_addresses_of_a_master() -> None:
    with plane() as ps:
        nowhere = Address(path=str(ps.folder / "nobody"))
        with connector([nowhere, ps.address], ps.identity.token) as dial:
            for _ in range(2):
                dial(5.0, 5.0).close()
        with pytest.raises(NothingListens), connector([nowhere, nowhere], ps.identity.token):
            pass


def test_local_master_is_found_at_its_announced_address(tmp_path: Path) -> None:
    home, token = StateDir(tmp_path), make_identity(insecure=True).token
    for listen, wanted in ((":7117", ":7117"), ("10.0.0.5:7", "10.0.0.5:7"), ("unix:/x", "unix:/x")):
        home.announce(Beacon(address="10.0.0.5:7", listen=listen, token=token.text, pid=1, patience=1.0))
        assert str(find_master(home, None, None)[0]) == wanted


@pytest.mark.parametrize("odd", ["\ufffd", "\ufffc"])
def test_name_with_a_replacement_character_is_refused(odd: str) -> None:
    with plane(patience=1) as ps, with_role(ps, "node") as connection:
        connection.send(replace(introduction(f"x{odd}", profiled=True), key=KEY))
        told_until_closed(connection)
        assert ps.ask().nodes == ()


def test_members_file_with_an_unprintable_name_is_loaded_and_keeps_its_expulsion(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    entry = {"key": digest, "expelled": "by an admin"}
    path.write_text(json.dumps({"version": 1, "members": {"x\ufffd": entry}}, ensure_ascii=False))
    members = Members(path)
    members.load()
    assert members.why_expelled("another", KEY) == "by an admin"
    assert members.forget("x?")


def test_expelling_a_node_beyond_the_limit_of_members_leaves_a_readable_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evener.ps.master.access.members.MAX_MEMBERS", 3)
    members = Members(tmp_path / "members.json")
    for number in range(3):
        members.bind(f"n{number}", key_of(number))
    members.expel("invited", "first")
    members.expel("n0", "second")
    for number in range(5):
        members.expel(f"keyless{number}", "by an admin")
    again = Members(tmp_path / "members.json")
    again.load()
    assert again.why_expelled("keyless4", "") == "by an admin"
    assert not again.why_expelled("keyless1", "")
    assert again.knows(key_of(1))


def test_full_members_file_has_4096_expelled_nodes_besides(tmp_path: Path) -> None:
    members = {f"n{number}": Member(key=key_of(number)) for number in range(MAX_MEMBERS)}
    members["expelled"] = Member(key="", expelled="by an admin")
    write_noun(MemberList(members=members), tmp_path / "members.json")
    Members(tmp_path / "members.json").load()


def test_nodes_that_are_gone_make_room_for_invited_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.ps.master.access.members.MAX_MEMBERS", 3)
    here = {"n0"}
    members = Members(tmp_path / "members.json", lambda name: name in here)
    for number, invitation in enumerate(["", "first", ""]):
        members.bind(f"n{number}", key_of(number), invitation)
    assert members.has_room
    members.bind("invited", key_of(3), "second")
    assert [members.knows(key_of(number)) for number in range(4)] == [True, True, False, True]
    assert not members.has_room


def test_keys_of_one_address_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.ps.master.access.members.MAX_KEYS_PER_HOST", 2)
    here = {"n1"}
    members = Members(tmp_path / "members.json", lambda name: name in here)
    members.bind("honest", key_of(9), host="10.0.0.9")
    for number in range(3):
        members.bind(f"n{number}", key_of(number), host="10.0.0.1")
    assert [members.knows(key_of(number)) for number in (0, 1, 2, 9)] == [False, True, True, True]
    here.add("n2")
    members.bind("n3", key_of(3), host="10.0.0.1")
    assert not members.knows(key_of(3))


def key_of(number: int) -> str:
    return f"{number:064}"


def test_expulsion_that_could_not_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    members = Members(tmp_path / "members.json", clock=lambda: now)
    members.bind("a", KEY)
    with monkeypatch.context() as full:

        def fail(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", "members.json")

        full.setattr("evener.ps.master.access.members.atomic_write", fail)
        with pytest.raises(OSError, match="No space"):
            members.expel("a", "it sent noise")
    assert members.why_expelled("a", KEY)
    now = 60.0
    members.tick()
    again = Members(tmp_path / "members.json")
    again.load()
    assert again.why_expelled("a", KEY) == "it sent noise"
