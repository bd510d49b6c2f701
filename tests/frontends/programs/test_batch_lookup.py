"""A batch is known again by its tensors, and by what torch functions make of them, as long as it is there."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from evener.frontends.programs.batch_lookup import HandedBatch, HandedBatches, Provenance
from evener.frontends.programs.batch_parts import BatchPart

PART = BatchPart(first=0, samples=2, total=4, loaded=2)


def give(batches: HandedBatches, owner: object, *tensors: Tensor, trains: bool = True) -> HandedBatch:
    return batches.give(tensors, owner, PART, 1.0, trains)


def test_lookup_finds_a_batch_by_its_tensors_and_their_views() -> None:
    batches, x, y = HandedBatches(), torch.randn(4, 3), torch.arange(4)
    first, second = give(batches, "a", x, y), give(batches, "a", torch.randn(4, 3))
    assert batches.of([x]) is batches.of([y]) is batches.of([torch.ones(1), x[1:].t()]) is first
    assert batches.of([torch.randn(4, 3)]) is None
    assert batches.is_last(second)
    assert not batches.is_last(first)


def test_slices_of_one_tensor_belong_to_different_batches() -> None:
    batches, data = HandedBatches(), torch.randn(12, 3)
    given = [give(batches, "a", data[i : i + 4]) for i in (0, 4, 8)]
    assert [batches.of([data[i : i + 2]]) for i in (0, 5, 8)] == given
    again = give(batches, "a", data[4:8])
    assert batches.of([data[4:8]]) is again
    assert not batches.are_kept()  # all data are there, whatever the program keeps


def test_reused_memory_matches_no_earlier_batch() -> None:
    batches = HandedBatches()
    for _ in range(50):
        x = torch.randn(100)
        assert batches.of([x]) is None
        give(batches, "a", x)
        del x


def test_lookup_detects_batches_that_stay_alive_except_the_latest() -> None:
    batches = HandedBatches()
    kept = torch.randn(3)
    give(batches, "a", kept)
    assert not batches.are_kept()
    give(batches, "a", torch.randn(3))
    assert batches.are_kept()
    del kept
    assert not batches.are_kept()
    evaluated, fixed = torch.randn(3), torch.randn(3)
    give(batches, "b", evaluated, trains=False)
    give(batches, "b", torch.randn(3), trains=False)
    give(batches, "c", fixed)
    assert not batches.are_kept()
    batches.leave("c")  # something else is trained on
    assert batches.are_kept()


@contextmanager
def followed(
    batches: HandedBatches, model: nn.Module
) -> Iterator[tuple[list[HandedBatch | None], list[HandedBatch], list[bool]]]:
    called, met, trains = list[HandedBatch | None](), list[HandedBatch](), list[bool]()

    def note(batch: HandedBatch | None, is_training: bool, _rows: set[int]) -> None:
        called.append(batch)
        trains.append(is_training)

    provenance = Provenance(batches, note, met.append)
    provenance.follow(model)
    provenance.begin()
    try:
        yield called, met, trains
    finally:
        provenance.end()


def test_derived_tensors_are_traced_to_the_model_and_no_further() -> None:
    batches, model = HandedBatches(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    first = give(batches, "a", x, y)
    second = give(batches, "a", torch.randn(4, 3))
    with followed(batches, model) as (called, met, trains):
        made = torch.cat([x.float().sub(1).div_(2), torch.ones(1, 3)]).clone()
        del x
        outputs = model(made)
        (outputs[:4] - y).square().mean().backward()
        with torch.no_grad():
            model[1](input=made)
        model(torch.randn(2, 3))
        model(outputs.detach())
        copy.deepcopy(model)(made)
    assert called == [first, first, None, None]
    assert trains == [True, False, True, True]
    assert first in met
    assert second not in met
    model(made)
    assert len(called) == 4


def test_functions_of_torch_func_compute_while_calls_are_followed() -> None:
    batches, model, x = HandedBatches(), nn.Sequential(nn.Linear(3, 3)), torch.randn(4, 3)
    give(batches, "a", x)
    with followed(batches, model) as (called, _, _):
        assert torch.equal(torch.vmap(torch.func.grad(lambda row: row.square().sum()))(x), 2 * x)
        assert torch.vmap(model)(x).shape == (4, 3)
    assert len(called) == 1


def test_model_error_does_not_hide_the_next_call() -> None:
    batches, model = HandedBatches(), nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 3))
    x = torch.randn(4, 3)
    given = give(batches, "a", x)
    with followed(batches, model) as (called, _, _):
        for _ in range(2):
            try:
                model(x)
            except RuntimeError:
                continue
    assert called == [given, given]


def test_followed_model_is_saved_as_one_that_needs_no_evener() -> None:
    batches, model, file = HandedBatches(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), io.BytesIO()
    x = torch.randn(4, 3)
    give(batches, "a", x)
    with followed(batches, model) as (called, _, _):
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(loaded(x), loaded[1](input=loaded[0](x)))
        assert not called
    assert b"evener" not in file.getvalue()
