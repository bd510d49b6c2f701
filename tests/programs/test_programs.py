"""Real programs with a few changed lines: on uneven nodes they train what they train alone, or are refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from programs.plain_ddp import DIFFER, under_ddp
from programs.suite import WORLDS, World, changed_lines, in_world, names, off, perform, plain, source

REFUSED = {
    "class_weights_as_they_were": "a mean over something else than samples",
    "contrastive_as_it_was": "evener.gather",
    "functional_gradients": "does not keep its gradients by loss.backward()",
    "hardest_triplets_as_they_were": "evener.gather",
    "late_hooks": "a hook on the gradient of `0.weight` was registered after run.prepare",
    "lazy_layers_as_they_were": "gets its shape from the first batch",
    "masked_autoencoder_as_it_was": "a mean over something else than samples",
    "masked_tokens_as_they_were": "a mean over something else than samples",
    "memory_table_as_it_was": "`table` is in no model of run.prepare",
    "prefetcher_of_arrays": "tensors of an unknown batch",
    "replay_as_it_was": "`replay` keeps what a node made of its own samples",
    "semi_supervised_unevenly": "give both loaders the same batch_size",
    "tokens_as_they_were": "a mean over something else than samples",
    "vae_as_it_was": 'count="sum"',
}
"""By program, what the sentence says with which it is refused."""
QUICK = ["mnist", "vae_as_it_was", "gan"]
MORE = [
    *("tokens", "lbfgs", "evaluated_amid"),
    *("uncertainty_weights", "contrastive", "experts", "averaged_weights", "prefetcher_of_arrays", "coins"),
    *("complex_network", "vae", "frozen_norms", "prefetcher", "list_of_batches", "cycled"),
    *("masked_autoencoder_as_it_was", "masked_tokens_as_they_were"),
    *("memory_table", "memory_table_as_it_was", "replay", "replay_as_it_was", "early_hooks", "late_hooks"),
]
"""Variations of those: with other norms, losses and loaders."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [pytest.param("nodes 3:1", marks=pytest.mark.slow), "nodes 5:2:0"])
def test_programs_of_every_kind_equal_one_process(world: str, tmp_path: Path) -> None:
    _hold(QUICK, WORLDS[world], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_program_variations_equal_one_process(tmp_path: Path) -> None:
    _hold(MORE, WORLDS["nodes 5:2:0"], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", WORLDS)
def test_all_programs_equal_one_process_or_are_refused(world: str, tmp_path: Path) -> None:
    _hold(names(), WORLDS[world], tmp_path)


def test_most_programs_change_at_most_five_lines() -> None:
    lines = sorted(changed_lines(source(name)) for name in names())
    assert lines[len(lines) // 2] <= 5


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_plain_ddp_trains_only_some_programs_correctly(tmp_path: Path) -> None:
    assert not under_ddp("mnist", tmp_path).sentence
    assert not under_ddp("experts", tmp_path).sentence  # with the option that its error message advises
    assert "uninitialized" in under_ddp("lazy_layers_as_they_were", tmp_path).sentence
    assert under_ddp("functional_gradients", tmp_path).sentence == DIFFER


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_programs_with_divided_layers_equal_one_process_or_are_refused(tmp_path: Path) -> None:
    chosen = ["mnist", "contrastive_as_it_was", "unet", "experts"]
    trained = _hold(chosen, World("1,2", "spatial"), tmp_path)
    assert trained == ["mnist", "contrastive_as_it_was", "unet"]


def _hold(chosen: Sequence[str], world: World, folder: Path) -> list[str]:
    """The programs that are trained: all but those that are refused for good reason."""
    outcomes, trained = in_world(world, chosen, folder), []
    for name in chosen:
        found = outcomes[name]
        if "," in world.shares and name in REFUSED and world.strategy == "auto":
            assert found.is_refused, name
            assert REFUSED[name] in found.sentence, (name, found.sentence)
            continue
        if found.is_refused and world.strategy != "auto":
            assert len(found.sentence.splitlines()) == 1, (name, found.sentence)
            continue
        assert not found.sentence, (name, found.sentence)
        assert off(found, perform(plain(source(name)), name)) < 1e-10, name
        trained.append(name)
    return trained
