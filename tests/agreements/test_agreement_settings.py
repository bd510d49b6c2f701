"""The knobs check each other, and the family's names stand for the published protocols."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from evener.agreements.settings import (
    AGREEMENT_SETTINGS,
    Adam,
    AgreementSettings,
    Sgd,
    Workload,
    average,
    diloco,
    rate_at,
)
from evener.records.agreement import AGREEMENT_FACTS, AgreementName
from evener.records.errors import InvalidValue

SGD = Sgd(learning_rate=0.1)


def test_protocol_names_give_the_published_settings() -> None:
    made = {
        "sync": AGREEMENT_SETTINGS["sync"](batch=8, outer=SGD),
        "async": AGREEMENT_SETTINGS["async"](batch=8, outer=SGD),
        "bounded": AGREEMENT_SETTINGS["bounded"](batch=8, outer=SGD, staleness=3),
        "average": AGREEMENT_SETTINGS["average"](batch=8),
        "federated": AGREEMENT_SETTINGS["federated"](batch=8, fraction=0.5),
        "diloco": AGREEMENT_SETTINGS["diloco"](batch=8),
    }
    assert made.keys() == AGREEMENT_SETTINGS.keys() == AGREEMENT_FACTS.keys() == set(get_args(AgreementName))
    assert {name: one.contribution == "gradient" for name, one in made.items()} == {
        name: facts.sends == "gradients" for name, facts in AGREEMENT_FACTS.items()
    }
    table = {name: (a.local_steps, a.staleness, a.contribution) for name, a in made.items()}
    assert table == {
        "sync": (1, 0, "gradient"),
        "async": (1, None, "gradient"),
        "bounded": (1, 3, "gradient"),
        "average": ("epoch", 0, "delta"),
        "federated": ("epoch", 0, "delta"),
        "diloco": (500, 0, "delta"),
    }
    assert average(batch=8).outer == Sgd(learning_rate=1.0)
    assert diloco(batch=8).outer == Sgd(learning_rate=0.7, momentum=0.9, is_nesterov=True)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"batch": 0}, "batch must be positive, got 0"),
        ({"local_steps": 0}, "local_steps must be positive"),
        ({"staleness": -1}, "staleness must be 0 or more, or None"),
        ({"local_steps": 2}, "contribution must be delta after several local steps, got 'gradient'"),
        ({"is_overlapped": True}, "contribution must be delta if is_overlapped"),
        ({"skips_late": True}, "skips_late must be false unless rounds exchange changes"),
        ({"skips_late": True, "contribution": "delta", "is_overlapped": True}, "skips_late must be false"),
        ({"skips_late": True, "contribution": "delta", "fraction": 0.5}, "skips_late must be false"),
        ({"skips_late": True, "contribution": "delta", "staleness": 2}, "skips_late must be false"),
        ({"local_steps": "epoch", "contribution": "delta", "staleness": 2}, "staleness must be 0 if a worker's local"),
    ],
)
def test_contradictory_settings_are_rejected(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        msgspec.structs.replace(AgreementSettings(batch=8, outer=SGD), **knobs)


@pytest.mark.parametrize(
    ("kind", "knobs", "message"),
    [
        (Sgd, {"learning_rate": 0.0}, "learning_rate must be positive"),
        (Sgd, {"learning_rate": ()}, "learning_rate must be positive, or a list of such"),
        (Sgd, {"learning_rate": (0.1, -0.1)}, "learning_rate must be positive"),
        (Sgd, {"learning_rate": 0.1, "momentum": 1.0}, "momentum must be from 0 to below 1"),
        (Sgd, {"learning_rate": 0.1, "is_nesterov": True}, "momentum must be positive with is_nesterov"),
        (Sgd, {"learning_rate": 0.1, "weight_decay": -1}, "weight_decay must be zero or more"),
        (Adam, {"learning_rate": 0.1, "betas": (0.9, 1.0)}, "betas must be from 0 to below 1"),
        (Adam, {"learning_rate": 0.1, "eps": 0.0}, "eps must be positive"),
        (Workload, {"num_samples": 5}, "num_epochs must be positive, or else num_updates set"),
        (Workload, {"num_samples": 0, "num_epochs": 1}, "num_samples must be positive, got 0"),
        (Workload, {"num_samples": 5, "num_updates": -1}, "num_updates must be positive, or None"),
    ],
)
def test_invalid_values_are_rejected(kind: type, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        kind(**knobs)


def test_protocol_survives_json() -> None:
    agreement = AgreementSettings(
        batch=8, outer=Adam(learning_rate=(0.1, 0.01)), local_steps="epoch", contribution="delta", push="int8"
    )
    assert msgspec.json.decode(msgspec.json.encode(agreement), type=AgreementSettings) == agreement
    bounded = AGREEMENT_SETTINGS["async"](batch=8, outer=SGD)
    assert msgspec.json.decode(msgspec.json.encode(bounded), type=AgreementSettings).staleness is None


def test_rate_of_each_version_is_the_scheduled_one() -> None:
    assert [rate_at(0.5, v) for v in (0, 9)] == [0.5, 0.5]
    assert [rate_at((0.5, 0.2), v) for v in (0, 1, 2, 99)] == [0.5, 0.2, 0.2, 0.2]
