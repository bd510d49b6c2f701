"""The claim by which a master's connection to a relay becomes a line on which a node may arrive.

    master                                          relay
      CLAIM     name of the master, nonce a  ->
                                             <-     nonce b, HMAC(key, "relay", name, a, b)
      HMAC(key, "master", name, a, b)        ->
                                             <-     ACCEPTED; the line waits for a node

A master's name begins with the time at which it started: a later master takes the place of an earlier one. The key
keeps strangers from standing in for the master. It protects nothing else: master and nodes authenticate each other, and
encrypt what they send, through the relay as without it.
"""

from __future__ import annotations

import hmac

MAGIC = b"EVRELAY1"
NAME_BYTES = NONCE_BYTES = 16
PROOF_BYTES = 32
ACCEPTED, OTHER_MASTER = b"\x01", b"\x02"
"""Replies to a proof: the line waits; a later master uses the relay."""
NO_MASTER = bytes((21, 3, 3, 0, 2, 2, 112))
"""Reply to a node while there is no master: TLS's alert `unrecognized_name`, which no master sends."""
CLAIM_BYTES = len(MAGIC) + NAME_BYTES + NONCE_BYTES
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES
MIN_KEY_LENGTH = 16
"""Characters of a key."""


def proof_of(key: str, side: bytes, claim: bytes, nonce: bytes) -> bytes:
    """Return the proof of `side` ("relay" or "master") that it knows the key of a claim."""
    return hmac.digest(key.encode(), side + claim + nonce, "sha256")


def is_proof(received: bytes, key: str, side: bytes, claim: bytes, nonce: bytes) -> bool:
    """Return whether `received` is the proof of `side`."""
    return hmac.compare_digest(received, proof_of(key, side, claim, nonce))
