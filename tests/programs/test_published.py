"""Programs as people publish them: on uneven nodes each trains what it trains alone, or is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.records.errors import EvenerError
from programs.cells import cell_names
from programs.suite import WORLDS, Outcome, in_world, off, perform, plain, source

QUICK = ["norms.frozen_statistics", "flow.dropped_norm", "networks.loss_in_single_precision"]
"""One of several kinds, for every run of the tests."""
REFUSED = {
    "batches.background_queue",
    "draws.cutmix_by_coin",
    "draws.masked_words",
    "draws.mixup",
    "flow.early_stop_by_own_loss",
    "flow.hard_examples",
    "flow.later_normalised_loss",
    "flow.pieces_of_a_batch",
    "flow.rare_positives",
    "flow.skip_easy_batches",
    "flow.weights_by_losses",
    "loaders.drawing_dataset",
    "loaders.few_shot_episodes",
    "loaders.mixing_collate",
    "networks.segmentation_by_dice",
    "optimizers.hessian_diagonal",
    "optimizers.plateau_of_own_loss",
    "optimizers.rate_by_batch_size",
    "state.centre_loss",
    "state.centred_teacher",
    "state.counted_after_eval",
    "state.counted_over_short_batches",
    "state.contrast_without_gather",
    "state.queue_of_keys",
    "state.reward_baseline",
    "state.running_scale",
    "state.statistics_of_features",
    "state.sums_unsaid",
    "state.target_before_the_model",
}
"""What several nodes cannot train as it is written."""
CAUSES = {
    "flow.early_stop_by_own_loss": "run.mean(loss)",
    "flow.pieces_of_a_batch": "backward()",
    "flow.skip_easy_batches": "backward()",
    "loaders.mixing_collate": "collate_fn",
    "optimizers.hessian_diagonal": "create_graph=True",
    "optimizers.rate_by_batch_size": "learning rate",
    "state.centre_loss": "`centres`",
    "state.centred_teacher": "`centre`",
    "state.counted_after_eval": "model.eval()",
    "state.counted_over_short_batches": "inside the loop",
    "state.running_scale": "`scale`",
    "state.target_before_the_model": "`target`",
}
"""Refused programs, and what the message names: a thing that differs between the nodes."""
DRAWN = {
    "draws.adversarial_examples",
    "draws.diffusion",
    "draws.dropout",
    "draws.gumbel_softmax",
    "draws.label_noise",
    "draws.masked_autoencoder",
    "draws.masked_words_per_row",
    "draws.monte_carlo_dropout",
    "draws.negative_sampling",
    "draws.noisy_inputs",
    "draws.random_flips",
    "draws.stochastic_depth",
    "draws.variational_autoencoder",
    "flow.discriminator_steps",
}
"""What draws numbers for its samples, or batches by hand without `run.epochs`: other ones than one process."""
TOLERANCE = 1e-9
"""Adam divides by gradients that are nearly zero, and so magnifies how sums are rounded."""
TOLERANCES = {"networks.loss_in_single_precision": 1e-7}
"""Programs that round to fewer digits themselves."""


def outcome_of(name: str, world: str, folder: Path) -> Outcome:
    """What a program came to; one that is refused after its first step ends the run."""
    try:
        return in_world(WORLDS[world], [name], folder)[name]
    except EvenerError as error:
        return Outcome({}, str(error), is_refused=True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in cell_names()]
)
@pytest.mark.parametrize("world", [pytest.param("nodes 3:1", marks=pytest.mark.slow), "nodes 5:2:0"])
def test_published_program_equals_one_process_or_is_refused(name: str, world: str, tmp_path: Path) -> None:
    found = outcome_of(name, world, tmp_path)
    assert bool(found.sentence) == (name in REFUSED), found.sentence
    if found.sentence:
        assert len(found.sentence.splitlines()) == 1
    elif name in DRAWN:
        assert found.values.keys() == perform(plain(source(name)), name).values.keys()
    else:
        assert off(found, perform(plain(source(name)), name)) < TOLERANCES.get(name, TOLERANCE)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name",
    [
        name if name == "state.target_before_the_model" else pytest.param(name, marks=pytest.mark.slow)
        for name in CAUSES
    ],
)
def test_refusal_names_the_values_that_differ_between_nodes(name: str, tmp_path: Path) -> None:
    sentence = outcome_of(name, "nodes 3:1", tmp_path).sentence
    assert CAUSES[name] in sentence
    assert "evener.gather(...) first" not in sentence


def test_most_published_programs_train_as_in_one_process() -> None:
    assert set(cell_names()) >= REFUSED | DRAWN
    assert len(REFUSED | DRAWN) <= 0.3 * len(cell_names())
