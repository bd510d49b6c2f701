"""What is trained is said by PyTorch or by the thin engine alike: the same layout, weights' names, and optimiser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import TINY
from safetensors.numpy import load_file, save

from evener import autodiff as ad
from evener.errors import InvalidInput
from evener.ps.thin_schedule import outer_of_thin
from evener.run.order import Order
from evener.run.ps_agreement import agreement_of
from evener.run.ps_engines import is_thin
from evener.run.ps_options import Way
from evener.run.ps_subject import Subject, load_subject
from evener.run.ps_thin import load_thin_subject
from evener.run.ps_torch import load_torch_subject
from evener.sync.agreement import Adam, Sgd
from evener.task import ThinTask

SMALL = {"channels": "4", "blocks": "1"}
THIN_ONLY = """
import numpy as np
from evener.autodiff import functional as F, nn, optim
from evener.task import ThinTask

thin_task = ThinTask(name="alone", model=lambda: nn.Linear(3, 2), loss=F.cross_entropy, batch_size=4,
    train_data=lambda: (np.zeros((8, 3), np.float32), np.zeros(8, np.int64)),
    optimizer=lambda parameters: optim.SGD(parameters, lr=0.1))
"""


def order(task: str, **words: Any) -> Order:
    return Order(**{"task": task, "output": "nowhere", "started": 0.0, **words})


def test_the_twins_of_a_task_are_the_same_subject() -> None:
    asked = order("digits", options=SMALL, epochs=2)
    torch, thin = load_torch_subject(asked), load_thin_subject(asked)
    sizes = ("name", "settings", "num_samples", "num_validation", "has_accuracy", "clips")
    assert {name: getattr(torch, name) for name in sizes} == {name: getattr(thin, name) for name in sizes}
    assert torch.weights.layout == thin.weights.layout
    ours, theirs = torch.outer(10), thin.outer(10)
    assert isinstance(ours, Adam)
    assert isinstance(theirs, Adam)
    np.testing.assert_allclose(ours.learning_rate, theirs.learning_rate, rtol=1e-6)
    assert (ours.betas, ours.eps, ours.weight_decay, ours.is_decoupled) == (
        theirs.betas,
        theirs.eps,
        theirs.weight_decay,
        theirs.is_decoupled,
    )


@pytest.mark.parametrize("load", [load_torch_subject, load_thin_subject])
def test_final_weights_are_kept_by_name(load: Any, tmp_path: Path) -> None:
    subject: Subject = load(order("digits", options=SMALL))
    arrays = {name: array + 1 for name, array in subject.weights.views().items()}
    subject.keep(save(arrays), tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == arrays.keys()
    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)


def test_a_file_with_a_thin_task_alone_is_thin_even_where_pytorch_is(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(THIN_ONLY)
    (tmp_path / "both.py").write_text("task = None\nthin_task = None\n")
    assert is_thin(str(tmp_path / "alone.py"))
    assert not is_thin(str(tmp_path / "both.py"))
    assert not is_thin(TINY)
    assert not is_thin("digits")
    assert not is_thin(str(tmp_path / "none.py"))
    subject = load_subject(order(str(tmp_path / "alone.py")))
    assert (subject.name, subject.num_samples, subject.num_validation) == ("alone", 8, 0)


def test_where_pytorch_is_missing_every_task_with_a_twin_is_thin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert is_thin("digits")
    assert not is_thin("tiny-imagenet")


def thin(optimizer: Any, rate: Any = None) -> Any:
    made = ThinTask(
        model=lambda: ad.nn.Linear(2, 2),
        loss=ad.functional.mse_loss,
        train_data=lambda: (np.zeros(0), np.zeros(0)),
        optimizer=optimizer,
        rate=rate,
    )
    return outer_of_thin(made, made.model(), 4)


def test_the_server_does_as_the_thin_optimiser_would() -> None:
    assert thin(lambda p: ad.optim.SGD(p, lr=0.5, momentum=0.9, nesterov=True, weight_decay=0.1)) == Sgd(
        learning_rate=0.5, momentum=0.9, is_nesterov=True, weight_decay=0.1
    )
    assert thin(lambda p: ad.optim.Adam(p, lr=0.5)) == Adam(learning_rate=0.5)
    assert thin(lambda p: ad.optim.AdamW(p, lr=0.5, weight_decay=0.1)) == Adam(
        learning_rate=0.5, weight_decay=0.1, is_decoupled=True
    )


def test_a_rate_becomes_one_number_a_step_and_is_never_zero() -> None:
    found = thin(lambda p: ad.optim.SGD(p, lr=2.0), rate=lambda step, steps: step / steps)
    assert found.learning_rate[1:] == (0.5, 1.0, 1.5)
    assert 0 < found.learning_rate[0] < 1e-300


def test_what_the_server_cannot_do_is_a_sentence() -> None:
    class Own(ad.optim.SGD):
        pass

    with pytest.raises(InvalidInput, match="does not know Own; with --agreement average"):
        thin(lambda p: Own(p, lr=0.1))
    with pytest.raises(InvalidInput, match="one group of parameters, the task's optimiser has 2"):
        thin(lambda p: ad.optim.SGD([{"params": [one]} for one in p], lr=0.1))


def test_a_bound_on_the_gradient_s_norm_does_not_go_with_rounds() -> None:
    outer = Sgd(learning_rate=0.1)
    with pytest.raises(InvalidInput, match="cannot bound the norm"):
        agreement_of(Way(protocol="sync"), lambda: outer, clips=True, batch=4)
    assert agreement_of(Way(protocol="async"), lambda: outer, clips=True, batch=4).outer == outer


def test_an_optimiser_that_the_server_does_not_know_may_make_local_steps() -> None:
    def unknown() -> Sgd:
        raise InvalidInput("the server does not know it")

    found = agreement_of(Way(protocol="average", local_steps="7"), unknown, clips=True, batch=4)
    assert (found.local_steps, found.contribution) == (7, "delta")
    with pytest.raises(InvalidInput, match="does not know"):
        agreement_of(Way(protocol="sync"), unknown, clips=False, batch=4)
