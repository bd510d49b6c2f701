"""State transfer to a rank that joins while the others train: it takes part in steps before it has the state.

    step t         a rank that has made it copies the state; a thread sends the copy
    t+1, t+2 ...   the others train. The rank that has come has no samples, and its weights are not yet those of the
                   others: so what it adds to sums counts for nothing. It keeps the sums of gradients
    the state of t is there
                   the rank makes the steps t+1, t+2 ... from the sums that it has kept, and is where the others are
    later          all have heard that from its report, and it has samples

No rank waits, and the steps are those of one process. After every step, the giver sends running statistics, which do
not follow from gradients, until the new rank reports that it has caught up.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from safetensors.torch import load, save
from torch import Tensor

from evener.comm.mesh import Mesh
from evener.membership.elastic_group import ElasticGroup
from evener.membership.side_channel import Inbox
from evener.records.errors import NodeLost
from evener.training.elastic.held_state import HeldState
from evener.training.elastic.state_transfer import send_state, take_state
from evener.training.training import Training

_STEP = struct.Struct("<q")
_FEWEST_KEPT, _KEPT_BYTES = 4, 2**30
"""Sums of gradients that are kept, at most: so many steps', or so many bytes, whichever is more."""


class Giver:
    """The sender of this rank's current state to another rank.

    Args:
        ranks: of this generation.
        rank: this rank.
        taker: the other one.
        held: a copy of the state.
        buffers: of the model.
    """

    def __init__(self, ranks: ElasticGroup, rank: int, taker: int, held: HeldState, buffers: Iterable[Tensor]) -> None:
        self.taker = taker
        self._held: HeldState | None = held
        self._sent = [buffer.clone() for buffer in buffers]
        self._channel = ranks.side_channel(rank, taker, self._give)

    def made(self, step: int, buffers: Iterable[Tensor]) -> None:
        """Send the buffers after `step`. Raise the error of the transfer if it failed."""
        if self._channel.error is not None and not isinstance(self._channel.error, NodeLost):
            raise self._channel.error
        changed = {
            str(i): now.detach().contiguous()
            for i, (now, sent) in enumerate(zip(buffers, self._sent, strict=True))
            if not torch.equal(now, sent)
        }
        self._channel.inbox.put(_STEP.pack(step) + save(changed))

    def end(self) -> None:
        """End the transfer: the other rank has caught up."""
        self._channel.inbox.put(None)

    def _give(self, mesh: Mesh, inbox: Inbox) -> None:
        assert self._held is not None
        send_state(self._held, mesh, 1)
        self._held = None
        while (message := inbox.get()) is not None:
            mesh.send_to(1, message)


class Taker:
    """The receiver of another rank's state, and of the changes since.

    Args:
        ranks: of this generation.
        giver: the other rank.
        rank: this rank.
        training: that is to have the state.
    """

    def __init__(self, ranks: ElasticGroup, giver: int, rank: int, training: Training) -> None:
        self._training = training
        self._kept: deque[tuple[int, list[Tensor | None]]] = deque()
        self._held: HeldState | None = None
        self._after = (-1, b"")  # the last step of the giver's, and its buffers
        self._channel = ranks.side_channel(giver, rank, self._take)

    @property
    def has_come(self) -> bool:
        """Whether the state is here. Raises the error of a failed transfer."""
        if self._channel.error is not None and self._held is None:
            raise self._channel.error
        return self._held is not None

    @property
    def is_full(self) -> bool:
        """Whether the buffer of gradients is full."""
        one = sum(0 if grad is None else grad.nbytes for _, grads in list(self._kept)[:1] for grad in grads)
        return len(self._kept) >= max(_FEWEST_KEPT, _KEPT_BYTES // max(1, one))

    def keep(self, step: int) -> None:
        """Keep the gradients of `step`, which are complete."""
        grads = [None if p.grad is None else p.grad.detach().clone() for p in self._training.model.parameters()]
        self._kept.append((step, grads))

    def catch_up(self, make: Callable[[int], None]) -> None:
        """Reach the step of the others; wait for the state if necessary. Raise the error of a failed transfer.

        Args:
            make: makes a step from the current gradients.
        """
        self._channel.wait_for(lambda: self._held is not None)
        assert self._held is not None
        self._held.restore(self._training)
        last = self._kept[-1][0] if self._kept else None
        while self._kept:
            step, grads = self._kept.popleft()
            for parameter, grad in zip(self._training.model.parameters(), grads, strict=True):
                parameter.grad = grad
            make(step)
        if last is not None:
            self._channel.wait_for(lambda: self._after[0] == last)  # the giver sends no other before this rank joins
            _put(load(self._after[1]), list(self._training.model.buffers()))

    def _take(self, mesh: Mesh, _: Inbox) -> None:
        held = take_state(mesh, 0)
        self._tell(held, self._after)
        while True:  # until the giver, or the generation, ends it
            message = mesh.receive_from(0)
            (step,) = _STEP.unpack(message[: _STEP.size])
            self._tell(held, (step, message[_STEP.size :]))

    def _tell(self, held: HeldState, after: tuple[int, bytes]) -> None:
        with self._channel.changed:
            self._held, self._after = held, after
            self._channel.changed.notify_all()


@torch.no_grad()
def _put(changed: dict[str, Tensor], buffers: Sequence[Tensor]) -> None:
    """Copy changed buffers, by index, into `buffers`."""
    for place, value in changed.items():
        buffers[int(place)].copy_(value)
