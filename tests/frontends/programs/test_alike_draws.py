"""Draws that are of no samples are alike on nodes that draw different numbers for different numbers of samples."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, overrides
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from evener.data.loader import seed_all
from evener.frontends.programs.alike_draws import AlikeDraws
from evener.records.errors import InvalidInput
from support.refusals import refused


@contextmanager
def active(draws: AlikeDraws) -> Iterator[None]:
    draws.begin()
    try:
        yield
    finally:
        draws.end()


class Noisy(nn.Module):
    """Draws for samples by what nobody looks into, and a coin for all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 1, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What was drawn for samples, and for none."""
        return self.inner(x, x, x)[0], torch.rand(1)


def a_node(samples: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """What a node draws for no samples, and for its own."""
    model = Noisy()
    draws, shared, own = AlikeDraws(seed, [(3, 4)], [model]), list[Tensor](), list[Tensor]()
    torch.manual_seed(3)
    with active(draws):
        for _ in range(3):
            own.append(torch.rand(samples, 8))
            shared += [torch.rand(1), torch.randn(3, 4), torch.zeros(3, 4).normal_()]
            own.append(F.dropout(torch.ones(samples, 8)))
            shared += [F.dropout(torch.ones(3, 4)), torch.distributions.Beta(1.0, 1.0).sample(), torch.randint(9, ())]
            made, coin = model(torch.ones(samples, 5, 4))
            own.append(made)
            shared.append(coin)
    return shared, own


def test_draws_without_samples_are_equal_on_all_nodes() -> None:
    (shared, own), (other, others_own) = a_node(2, 0), a_node(5, 1)
    assert all(torch.equal(a, b) for a, b in zip(shared, other, strict=True))
    assert len({float(one.sum()) for one in shared}) > 15  # other ones each time
    assert not torch.equal(own[0], others_own[0][:2])


def test_draws_without_samples_equal_those_of_one_process() -> None:
    shared = a_node(2, 0)[0]
    torch.manual_seed(3)
    for i in range(0, 21, 7):
        assert torch.equal(shared[i], torch.rand(1))
        assert torch.equal(shared[i + 1], torch.randn(3, 4))
        assert torch.equal(shared[i + 2], torch.zeros(3, 4).normal_())
        assert torch.equal(shared[i + 3], F.dropout(torch.ones(3, 4)))
        assert torch.equal(shared[i + 4], torch.distributions.Beta(1.0, 1.0).sample())
        assert torch.equal(shared[i + 5], torch.randint(9, ()))
        assert torch.equal(shared[i + 6], torch.rand(1))


def test_scalar_draw_inside_a_checkpointed_block_is_refused() -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(lambda y: y * torch.rand(1), x, use_reentrant=False)

    model = Block()
    with active(AlikeDraws(5, [], [model])), refused(InvalidInput):
        model(torch.ones(1, 2))


def test_generator_of_the_program_is_not_replaced() -> None:
    with active(AlikeDraws(5, [])):
        own = torch.rand(1, generator=torch.Generator().manual_seed(3))
    assert torch.equal(own, torch.rand(1, generator=torch.Generator().manual_seed(3)))


def _modes() -> Any:
    stack: Any = overrides
    return stack._get_current_function_mode_stack()


def test_program_modes_and_draws_exit_in_any_order() -> None:
    draws = AlikeDraws(5, [])
    with torch.device("meta"):
        draws.begin()
        assert torch.zeros(2).is_meta
    assert not torch.zeros(2).is_meta
    assert _modes() == [draws]
    draws.end()
    assert not _modes()


def test_dropout_in_place_outside_of_models_drops_once() -> None:
    with active(AlikeDraws(5, [])):
        kept = F.dropout(torch.ones(4000), 0.5, inplace=True)
    assert set(kept.tolist()) == {0.0, 2.0}  # twice would give 4


def drawn_after_backward(seed: int, is_compared: bool) -> tuple[Tensor, Tensor]:
    """Noise of a weight that a node draws after its backward pass, and noise of samples in the next batch."""
    draws = AlikeDraws(seed, [], is_compared=is_compared)
    torch.manual_seed(3)
    with active(draws):
        draws.is_after_backward = True
        noise = torch.randn(3, 4)
        draws.is_after_backward = False
        return noise, torch.randn(2, 4)


def test_draws_after_backward_are_shared_if_the_shapes_are_unknown() -> None:
    (noise, own), (other, others_own) = (drawn_after_backward(seed, is_compared=False) for seed in (0, 1))
    assert torch.equal(noise, other)
    assert not torch.equal(own, others_own)
    known = [drawn_after_backward(seed, is_compared=True)[0] for seed in (0, 1)]
    assert not torch.equal(*known)  # such as noise for samples of a second loss


def test_seeds_give_shared_draws_of_one_process_and_other_local_ones() -> None:
    found = []
    for rank in range(2):
        draws = AlikeDraws(rank, [])
        with active(draws):
            draws.seed(7, 4, rank=rank)
            found.append((torch.rand(1), torch.rand(5), random.random()))
    seed_all(7, 4)
    alone = torch.rand(1), random.random()
    assert all(torch.equal(coin, alone[0]) and number == alone[1] for coin, _, number in found)
    assert not torch.equal(found[0][1], found[1][1])
