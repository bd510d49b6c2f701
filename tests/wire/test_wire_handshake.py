"""The greeting: both sides prove the secret, nobody says it, and nothing else is accepted."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.wire.errors import CannotJoin, MasterFull, NotAMaster, TransportDiffers, VersionDiffers, WrongSecret
from evener.wire.handshake import MESSAGE_BYTES, HandshakeType, MasterHandshake, NodeHandshake, encode_message
from evener.wire.identity import Token
from support.refusals import refused

SECRET = bytes(range(16))
PLAIN = Token(secret=SECRET, fingerprint=None)
TLS = Token(secret=SECRET, fingerprint=bytes(range(32)))
A, B = b"a" * 32, b"b" * 32


def greet(node: Token, master: Token, *, full: bool = False, nonce: bytes = A) -> list[bytes]:
    """All notes of a greeting, the node's and the master's in turn."""
    node_side, master_side = NodeHandshake(node, nonce, "gpu-box, port 7000"), MasterHandshake(master, B)
    said: bytes | None = node_side.hello()
    notes = []
    while said is not None:
        answer = master_side.answer(said, lambda _: full)
        notes += [said, answer.message]
        said = node_side.answer(answer.message)
    assert answer.welcome
    return notes


@pytest.mark.parametrize("token", [PLAIN, TLS])
def test_handshake_takes_four_messages_of_forty_bytes(token: Token) -> None:
    notes = greet(token, token)
    assert [(len(n), n[:6], n[7]) for n in notes] == [
        (MESSAGE_BYTES, b"EVENER", kind)
        for kind in (HandshakeType.HELLO, HandshakeType.CHALLENGE, HandshakeType.PROOF, HandshakeType.WELCOME)
    ]


@pytest.mark.parametrize(("token", "fingerprint"), [(PLAIN, bytes(32)), (TLS, bytes(range(32)))])
def test_handshake_proofs_are_the_documented_hmacs(token: Token, fingerprint: bytes) -> None:
    _, _, proof, welcome = greet(token, token)
    assert proof[8:] == hmac.digest(SECRET, b"evener wire 1 node " + fingerprint + A + B, "sha256")
    assert welcome[8:] == hmac.digest(SECRET, b"evener wire 1 master " + fingerprint + A + B, "sha256")


def test_handshake_never_contains_the_secret() -> None:
    assert not any(SECRET[i : i + 4] in n for n in greet(PLAIN, PLAIN) for i in range(12))


@pytest.mark.parametrize(
    ("node", "master"),
    [
        (Token(secret=bytes(16), fingerprint=None), PLAIN),
        (TLS, PLAIN),
        (Token(secret=SECRET, fingerprint=bytes(32)), TLS),
    ],
)
def test_wrong_secret_or_certificate_is_rejected(node: Token, master: Token) -> None:
    with refused(WrongSecret):
        greet(node, master)


def test_only_an_authenticated_node_learns_that_the_master_is_full() -> None:
    with refused(MasterFull):
        greet(PLAIN, PLAIN, full=True)
    with pytest.raises(WrongSecret):
        greet(Token(secret=bytes(16), fingerprint=None), PLAIN, full=True)


def test_proof_of_one_handshake_is_invalid_in_another() -> None:
    hello, _, proof, _ = greet(PLAIN, PLAIN)
    again = MasterHandshake(PLAIN, b"c" * 32)
    again.answer(hello)
    assert again.answer(proof).refusal == "it does not know the secret"


def test_node_rejects_its_own_proof() -> None:
    node = NodeHandshake(PLAIN, A, "x")
    node.hello()
    proof = node.answer(encode_message(HandshakeType.CHALLENGE, A))
    assert proof is not None
    with pytest.raises(WrongSecret):
        node.answer(encode_message(HandshakeType.WELCOME, proof[8:]))


def test_node_rejects_a_master_without_a_proof() -> None:
    node = NodeHandshake(PLAIN, A, "x")
    with refused(NotAMaster):
        node.answer(encode_message(HandshakeType.WELCOME))
    node = NodeHandshake(PLAIN, A, "x")
    node.answer(encode_message(HandshakeType.CHALLENGE, B))
    with pytest.raises(WrongSecret):
        node.answer(encode_message(HandshakeType.WELCOME))


@pytest.mark.parametrize(
    ("notes", "refusal"),
    [
        ([encode_message(HandshakeType.PROOF)], "not an Evener client (bad handshake)"),
        (
            [encode_message(HandshakeType.HELLO), encode_message(HandshakeType.HELLO)],
            "not an Evener client (bad handshake)",
        ),
        ([encode_message(HandshakeType.WELCOME)], "not an Evener client (bad handshake)"),
        ([b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n"[:40]], "not an Evener client (bad handshake)"),
        ([b"EVENER\x02\x01" + bytes(32)], "it uses another protocol version"),
        (
            [encode_message(HandshakeType.HELLO), encode_message(HandshakeType.PROOF, bytes(32))],
            "it does not know the secret",
        ),
    ],
)
def test_master_rejects_invalid_handshakes(notes: list[bytes], refusal: str) -> None:
    master = MasterHandshake(PLAIN, B)
    replies = [master.answer(n) for n in notes]
    assert not any(reply.welcome for reply in replies)
    assert [reply.refusal for reply in replies] == [""] * (len(notes) - 1) + [refusal]


@pytest.mark.parametrize(
    ("answer", "error", "sentence"),
    [
        (encode_message(HandshakeType.WRONG_SECRET), WrongSecret, "it does not know this token's secret"),
        (encode_message(HandshakeType.FULL), MasterFull, "raise its limit"),
        (encode_message(HandshakeType.TLS_HERE), TransportDiffers, "one side uses TLS and the other does not"),
        (encode_message(HandshakeType.NO_HELLO), NotAMaster, "the program at that port is not an Evener master"),
        (b"EVENER\x07\x11" + bytes(32), VersionDiffers, r"\(version 7 there, 1 here\); install the same version"),
        (b"EVENER\x07\x02" + bytes(32), VersionDiffers, "version 7 there, 1 here"),
        (b"HTTP/1.1 400 Bad Request\r\nConnection: cl", NotAMaster, "it uses another protocol"),
        (encode_message(HandshakeType.PROOF), NotAMaster, "unexpected handshake message"),
    ],
)
def test_node_names_the_error_the_address_and_the_remedy(answer: bytes, error: type[CannotJoin], sentence: str) -> None:
    node = NodeHandshake(PLAIN, A, "gpu-box, port 7000")
    with pytest.raises(error, match=sentence) as refused:
        node.answer(answer)
    assert str(refused.value).startswith("cannot reach the master at gpu-box, port 7000: ")


@settings(deadline=None)
@given(
    st.lists(
        st.binary(min_size=MESSAGE_BYTES, max_size=MESSAGE_BYTES)
        | st.builds(encode_message, st.sampled_from(HandshakeType), st.binary(min_size=32, max_size=32)),
        max_size=5,
    )
)
def test_no_random_messages_pass_the_handshake(notes: list[bytes]) -> None:
    master = MasterHandshake(PLAIN, B)
    assert not any(master.answer(n).welcome for n in notes)
