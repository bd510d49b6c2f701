"""A token for one node, for several, or for a submitter: with an end, and revocable; who came stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from evener.ps.master.access.invitations import MAX_INVITATIONS, Invitations
from evener.ps.master.access.members import Members
from evener.ps.master.scheduler import Scheduler
from evener.ps.protocol import messages as m
from evener.ps.protocol.config import StateDir
from evener.ps.protocol.directions import ToNode
from evener.ps.protocol.job import Submission
from evener.ps.protocol.messages import Invite, RevokeInvitation
from evener.records.errors import InvalidInput, InvalidValue
from evener.wire.connect import open_connection
from evener.wire.connection import Connection
from evener.wire.errors import WrongSecret
from evener.wire.identity import ROLES, Grant, Token, make_identity
from evener.wire.limits import Limits
from support.agreements import SYNC
from support.linear_engine import job, weights
from support.master_in_threads import Plane, plane, wait_until
from support.refusals import refused
from support.strangers import introduction, log_of, told_until_closed

KEYS = [f"{number:x}" * 64 for number in range(1, 6)]


class World:
    """Invitations without a master, by a clock that is told what it shows."""

    def __init__(self, folder: Path) -> None:
        self.now, self.folder = 1e9, folder
        self.members, self.identity = Members(folder / "members.json"), make_identity(insecure=True)
        self.start()

    def start(self) -> None:
        self.tokens: dict[Grant, Token] = {}
        self.all = Invitations(
            self.folder / "invitations.json", self.identity, self.members, self.tokens, lambda: self.now
        )
        self.all.load()


def test_invitation_bounds_keys_and_time_and_survives_a_restart(tmp_path: Path) -> None:
    world = World(tmp_path)
    name, token = world.all.invite("", 2, 60.0)
    assert world.tokens == {Grant("node", name): token}
    assert (tmp_path / "invitations.json").stat().st_mode & 0o777 == 0o600
    assert token.secret not in (tmp_path / "invitations.json").read_bytes()
    world.members.bind("a", KEYS[0], name)
    world.members.bind("a-2", KEYS[0], name)
    assert world.all.why_not(name) == ""
    world.members.bind("b", KEYS[1], name)
    assert world.all.why_not(name) == "the invitation was for 2 nodes, which have joined"
    world.now += 61
    assert world.all.why_not(name) == "the invitation has expired"
    world.start()
    assert world.tokens == {Grant("node", name): token}
    assert [(one.joined, one.seconds) for one in world.all.status()] == [(2, 0.0)]


def test_revoked_invitation_without_joined_nodes_is_deleted(tmp_path: Path) -> None:
    world = World(tmp_path)
    used, _ = world.all.invite("", 1, 60.0)
    unused, _ = world.all.invite("", 1, 60.0)
    submitter, _ = world.all.invite("alice", 1, 60.0)
    world.members.bind("a", KEYS[0], used)
    assert world.all.submitter_of(Grant("submitter", submitter)) == "alice"
    assert world.all.submitter_of(Grant("admin")) == "admin"
    for name in (used, unused, submitter):
        assert world.all.revoke(name)
    assert not world.all.revoke("0000")
    assert [one.name for one in world.all.status()] == [used]
    assert list(world.tokens) == [Grant("node", used)]
    assert world.all.why_not(used) == "the invitation was revoked"


def test_number_of_invitations_is_bounded(tmp_path: Path) -> None:
    world = World(tmp_path)
    for _ in range(MAX_INVITATIONS):
        world.all.invite("", 1, 60.0)
    with refused(InvalidValue):
        world.all.invite("", 1, 60.0)
    world.now += 61
    world.all.invite("", 1, 60.0)
    assert len(world.all.status()) == 1
    with refused(InvalidValue):
        world.all.invite("", 0, 60.0)


def invited(ps: Plane, token: str) -> Connection[m.Header]:
    return open_connection(ps.address, Token.parse(token), ToNode, Limits(patience=5))


def answer_to(connection: Connection[m.Header], name: str, key: str) -> m.Header:
    connection.send(replace(introduction(name), key=key))
    while not isinstance(header := connection.receive().header, m.Welcome | m.Dismiss):
        pass
    return header


def test_invited_node_may_rejoin_after_revocation_but_no_new_one() -> None:
    with plane(patience=1.0) as ps, ps.control() as admin:
        invitation = admin.invite(Invite(nodes=1, seconds=60.0))
        with invited(ps, invitation.token) as connection:
            assert isinstance(answer_to(connection, "a", KEYS[0]), m.Welcome)
        with invited(ps, invitation.token) as connection:
            refused = answer_to(connection, "b", KEYS[1])
            assert isinstance(refused, m.Dismiss)
            assert (
                "the invitation was for 1 node, which have joined: ask the master's administrator for another one"
                in refused.reason
            )
        status = admin.change(RevokeInvitation(invitation=invitation.invitation))
        assert [(one.joined, one.seconds) for one in status.invitations] == [(1, 0.0)]
        with invited(ps, invitation.token) as connection:
            assert isinstance(answer_to(connection, "a", KEYS[0]), m.Welcome)
        with invited(ps, invitation.token) as connection:
            refused = answer_to(connection, "c", "")
            assert isinstance(refused, m.Dismiss)
            assert "needs a key" in refused.reason
        acts = [line["what"] for line in log_of(ps)]
        assert {"invited", "revoked", "joined"} <= set(acts)


def test_expelled_node_cannot_rejoin_by_invitation_with_another_key() -> None:
    with plane() as ps, ps.control() as admin:
        invitation = admin.invite(Invite(nodes=1, seconds=60.0))
        with invited(ps, invitation.token) as connection:
            assert isinstance(answer_to(connection, "a", KEYS[0]), m.Welcome)
            admin.change(m.ExpelNode(name="a"))
        for name, key in (("a", KEYS[0]), ("b", KEYS[1])):
            with invited(ps, invitation.token) as connection:
                assert isinstance(answer_to(connection, name, key), m.Dismiss)


def test_invited_submitter_has_a_name_and_cannot_invite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with plane("a") as ps, ps.control() as admin:
        invitation = admin.invite(Invite(submitter="alice", seconds=60.0))
        heard: list[str] = []
        begin = Scheduler.begin

        def listening(self: Scheduler, submission: Submission) -> None:
            heard.append(submission.job.submitter)
            begin(self, submission)

        monkeypatch.setattr(Scheduler, "begin", listening)
        own, ps.identity = ps.identity, ps.identity
        from evener.ps.client import MasterClient

        with MasterClient(ps.address, Token.parse(invitation.token), 5.0) as alice:
            alice.submit(job(SYNC), weights(), [])
            alice.watch("linear-1", lambda _: None, lambda: None)
            with refused(InvalidInput):
                alice.invite(Invite(seconds=1.0))
        assert heard == ["alice"]
        admin.change(RevokeInvitation(invitation=invitation.invitation))
        with pytest.raises(WrongSecret):
            MasterClient(ps.address, Token.parse(invitation.token), 5.0)
        assert own == ps.identity


def test_only_joined_nodes_may_fetch_code_and_data() -> None:
    with plane() as ps, ps.control() as admin, invited(ps, admin.invite(Invite(seconds=60.0)).token) as connection:
        connection.send(m.FetchBlob(digest="0" * 64, offset=0))
        told_until_closed(connection)
        wait_until(lambda: ps.ask() is not None)


def test_token_rotation_deletes_invitations(tmp_path: Path) -> None:
    home = StateDir(tmp_path)
    home.identity(insecure=True)
    world = World(tmp_path)
    world.all.invite("", 1, 60.0)
    home.identity(insecure=True, rotate=True)
    world.start()
    assert world.all.status() == ()


def test_token_rotation_changes_the_identity_with_and_without_encryption(tmp_path: Path) -> None:
    home = StateDir(tmp_path)
    before = home.identity(insecure=True)
    home.identity(insecure=False)
    home.identity(insecure=False, rotate=True)
    assert home.identity(insecure=True).token != before.token


@pytest.mark.parametrize("name", ROLES)
def test_invitation_of_a_submitter_cannot_have_the_name_of_a_role(tmp_path: Path, name: str) -> None:
    with refused(InvalidValue):
        World(tmp_path).all.invite(name, 1, 60.0)
