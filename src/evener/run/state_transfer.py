"""The state of a training, from a rank that holds it to ranks that do not: over the mesh, without pickle.

What travels is what a checkpoint holds, and the history: the rank may be the one that writes the record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from safetensors.torch import load, save

from evener.comm.mesh import Mesh
from evener.history import History
from evener.parallel.replicated import ReplicatedModel
from evener.run.checkpoint import Checkpoint, CheckpointState, apart
from evener.run.training import Training
from evener.schema import Amount

_PIECE = 2**28
"""Bytes of a message, at most."""
_Sizes = tuple[Amount, Amount, Amount, Amount]
"""Bytes of the parts of a state: what is no tensor, weights, optimiser's tensors, history."""


def send_state(training: Training, state: CheckpointState, history: History, mesh: Mesh, to: Sequence[int]) -> None:
    """Send this rank's state to the ranks `to`.

    Args:
        training: whose state.
        state: what of it is no tensor, as a checkpoint begins with.
        history: of the run so far.
        mesh: of the ranks.
        to: who are to take it.
    """
    model = training.model
    assert isinstance(model, ReplicatedModel)
    scheduler, scaler = training.scheduler, training.context.arithmetic.scaler
    whole = Checkpoint.of(state, model.weights(), training.optimizer.inner.state_dict(), scheduler, scaler)
    parts = (
        msgspec.json.encode(whole.state),
        save(apart(whole.weights)),
        save(dict(whole.optimizer)),
        msgspec.msgpack.encode(history),
    )
    sizes = msgspec.json.encode([len(part) for part in parts])
    for rank in to:
        mesh.send_to(rank, sizes)
        for part in parts:
            for piece in _pieces(part):
                mesh.send_to(rank, piece)


def take_state(training: Training, mesh: Mesh, source: int) -> History:
    """Take over the state that rank `source` sends; the history of the run so far."""
    parts = []
    for size in msgspec.json.decode(mesh.receive_from(source), type=_Sizes):
        part = bytearray()
        while len(part) < size:
            part += mesh.receive_from(source)
        parts.append(bytes(part))
    state = msgspec.json.decode(parts[0], type=CheckpointState)
    whole = Checkpoint(state=state, weights=load(parts[1]), optimizer=load(parts[2]))
    whole.restore(training.model, training.optimizer, training.scheduler, training.context.arithmetic.scaler)
    return msgspec.msgpack.decode(parts[3], type=History)


def _pieces(data: bytes) -> Iterator[bytes]:
    return (data[start : start + _PIECE] for start in range(0, len(data), _PIECE))
