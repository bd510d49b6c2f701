"""The state of a training after a step, or one rank's part of it, in memory and on the wire, without pickle.

It holds the content of a checkpoint, and the history, since any rank may write the record later. Parts that together
make up the model make the whole state, for any division; any other division can load it.

    length of the head (8 bytes) | head: step, pieces, lengths | settings | weights | optimiser | history
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor

from evener.oracle.division.pieces import Piece, region_indices, whole_piece
from evener.records.decoding import decode_json, decode_msgpack
from evener.records.history import History
from evener.records.schema import Amount, Part
from evener.training.attributes import restore_attributes
from evener.training.checkpoint import Checkpoint, CheckpointState, apart, revived
from evener.training.training import Training

_LENGTH = struct.Struct("<Q")


class StateHead(Part, frozen=True, kw_only=True):
    """The header of an encoded state.

    Attributes:
        step: after which it is.
        is_settled: whether what follows that step (validation, checkpoint) is done.
        weights: which parts of the model's weights it has, by name.
        optimizer: which of the optimiser's tensors are parts, by `<parameter index>.<name>`.
        sizes: bytes of what follows.
    """

    step: Amount
    is_settled: bool
    weights: dict[str, Piece]
    optimizer: dict[str, Piece]
    sizes: tuple[Amount, Amount, Amount, Amount] = (0, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class HeldState:
    """A state, or a part of one: copies on the CPU.

    Attributes:
        head: what it is.
        checkpoint: its tensors and numbers.
        history: of the run up to its step.
    """

    head: StateHead
    checkpoint: Checkpoint
    history: History

    @staticmethod
    def of(training: Training, state: CheckpointState, history: History, *, is_settled: bool = True) -> HeldState:
        """Copy this rank's current state.

        Args:
            training: whose state.
            state: what of it is no tensor, as a checkpoint begins with.
            history: of the run so far.
            is_settled: whether what follows the step is done.
        """
        weights, _ = training.model.own_weights()
        optimizer, _ = training.optimizer.own()
        scaler = training.context.arithmetic.scaler
        checkpoint = Checkpoint.of(state, weights, optimizer, training.scheduler, scaler)
        head = head_of(training, state.step, is_settled=is_settled)
        return HeldState(head=head, checkpoint=checkpoint, history=history)

    @staticmethod
    def decode(data: bytes | bytearray | memoryview) -> HeldState:
        """Decode the result of `encode`."""
        view = memoryview(data)
        head, start = _read_head(view)
        parts = []
        for size in head.sizes:
            parts.append(bytes(view[start : start + size]))
            start += size
        state = decode_json(parts[0], CheckpointState)
        return HeldState(
            head=head,
            checkpoint=Checkpoint(state=state, weights=load(parts[1]), optimizer=load(parts[2])),
            history=decode_msgpack(parts[3], History),
        )

    def encode(self) -> bytes:
        """Return the encoded state."""
        parts = (
            msgspec.json.encode(self.checkpoint.state),
            save(apart(self.checkpoint.weights)),
            save(apart(self.checkpoint.optimizer)),
            msgspec.msgpack.encode(self.history),
        )
        sizes = (len(parts[0]), len(parts[1]), len(parts[2]), len(parts[3]))
        head = msgspec.json.encode(msgspec.structs.replace(self.head, sizes=sizes))
        return b"".join((_LENGTH.pack(len(head)), head, *parts))

    def restore(self, training: Training) -> None:
        """Bring `training` to this whole state. Raise InvalidInput if it is of another model."""
        scaler = training.context.arithmetic.scaler
        self.checkpoint.restore(training.model, training.optimizer, training.scheduler, scaler)
        restore_attributes(training.owners, revived(self.checkpoint.state.attributes))


def head_of(training: Training, step: int, *, is_settled: bool) -> StateHead:
    """Return the header of this rank's part of the state after `step`; copy nothing."""
    weights, divided = training.model.own_weights()
    _, pieces = training.optimizer.own()
    held = {name: divided.get(name) or whole_piece(tensor.shape) for name, tensor in weights.items()}
    return StateHead(step=step, is_settled=is_settled, weights=held, optimizer=pieces)


def read_head(data: bytes | bytearray | memoryview) -> StateHead:
    """Return the header of an encoded state."""
    return _read_head(memoryview(data))[0]


def assemble(parts: Sequence[HeldState]) -> HeldState:
    """Assemble the whole state from `parts`, which may overlap."""
    first = parts[0]
    numbers = {name: value for part in reversed(parts) for name, value in part.checkpoint.state.numbers.items()}
    state = msgspec.structs.replace(first.checkpoint.state, numbers=numbers)
    weights = _assembled([part.checkpoint.weights for part in parts], [part.head.weights for part in parts])
    optimizer = _assembled([part.checkpoint.optimizer for part in parts], [part.head.optimizer for part in parts])
    head = StateHead(
        step=first.head.step,
        is_settled=all(part.head.is_settled for part in parts),
        weights={name: whole_piece(tensor.shape) for name, tensor in weights.items()},
        optimizer={},
    )
    whole = Checkpoint(state=state, weights=weights, optimizer=optimizer)
    return HeldState(head=head, checkpoint=whole, history=first.history)


def _assembled(rows: Sequence[Mapping[str, Tensor]], places: Sequence[Mapping[str, Piece]]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for tensors, pieces in zip(rows, places, strict=True):
        for name, tensor in tensors.items():
            piece = pieces.get(name)
            if piece is None or piece.is_whole:
                whole[name] = tensor
            else:
                made = whole.setdefault(name, tensor.new_empty(piece.shape))
                made[tuple(torch.from_numpy(indices) for indices in region_indices(piece.region))] = tensor
    return whole


def _read_head(view: memoryview) -> tuple[StateHead, int]:
    """Return the header, and the offset of the data after it."""
    (length,) = _LENGTH.unpack(view[: _LENGTH.size])
    start = _LENGTH.size + length
    return decode_json(view[_LENGTH.size : start], StateHead), start
