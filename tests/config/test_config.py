"""What is asked of a run checks itself: values, and options that do not go together, whichever plane they are of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evener.config.conflicts import strategy_conflict
from evener.config.run_config import RunConfig, decode_config, encode_config
from evener.records.errors import InvalidInput
from evener.training.planning import candidate_strategies

SHIPPED = {"agreement": "sync", "ship_data": True}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            {"agreement": "often"},
            "--agreement must be one of sync, async, bounded, average, federated, diloco, got 'often'",
        ),
        ({"agreement": "sync", "compress": "zip"}, "--compress must be one of none, bf16, int8"),
        ({"agreement": "sync", "staleness": 2}, "--staleness belongs to --agreement bounded"),
        ({"agreement": "sync", "overlap": True}, "--overlap belongs to --agreement average or diloco"),
        ({"agreement": "sync", "skip_late": True}, "--skip-late belongs to --agreement average or diloco"),
        ({"agreement": "average", "skip_late": True, "robust": "median"}, "--robust trimmed, median and krum need"),
        ({"agreement": "average", "compress": "top-k", "robust": "krum"}, "--robust trimmed, median and krum need"),
        ({"skip_late": True}, "--skip-late belongs to --agreement average or diloco"),
        ({"agreement": "diloco", "skip_late": True, "overlap": True}, "--skip-late does not go with --overlap"),
        ({"agreement": "average", "outer_lr": 0.5}, "--outer-lr belongs to --agreement diloco"),
        ({"compress": "int8"}, "--compress belongs to --agreement sync, async, bounded, average, federated, diloco"),
        ({"home": Path("home"), "local_nodes": "1"}, "--home belongs to --agreement"),
        ({"home": Path("home"), "elastic": True}, "--elastic does not go with the nodes of a master"),
        ({"token_file": Path("token")}, "--token-file belongs to --agreement"),
        ({"agreement": "diloco", "local_steps": "epoch"}, "--local-steps must be a number with --agreement diloco"),
        ({"agreement": "diloco", "local_steps": "0"}, "--local-steps must be a positive number"),
        ({"agreement": "diloco", "outer_momentum": 1.0}, "--outer-momentum must be between 0 and 1, got 1.0"),
        ({"agreement": "sync", "strategy": "data"}, "--strategy does not go with --agreement: omit one of them"),
        ({"agreement": "sync", "plan": Path("plan")}, "--plan does not go with --agreement"),
        ({"agreement": "sync", "memory": "4GB"}, "--memory does not go with --agreement"),
        ({"agreement": "async", "compress": "top-k"}, "made in rounds: sync, average, federated, diloco"),
        ({"agreement": "sync", "precision": "fp16"}, "--precision must be fp32, bf16 or fp64 with --agreement"),
        ({"agreement": "sync", "local_nodes": "1", "master": "here"}, "leave --master and --token out"),
        ({**SHIPPED, "local_nodes": "1", "data": Path("data")}, "--ship-data: local nodes read the data where"),
        (SHIPPED, "--ship-data needs --data DIR"),
        ({"agreement": "sync", "token": "t", "token_file": Path("t")}, "--token and --token-file exclude each other"),
        ({"plan": Path("plan"), "shares": "equal"}, "--shares does not go with --plan, which says it already"),
        ({"strategy": "sharded", "rematerialise": "except_last"}, "it is for pipelines if it is except_last"),
        ({"strategy": "pipeline+filter", "schedule": "zero-bubble"}, "one node a stage if it is zero-bubble"),
        ({"patience": 0.0}, "--patience must be positive seconds"),
    ],
    ids=str,
)
def test_contradictory_options_raise_a_sentence(words: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        RunConfig(task="digits", **words)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("words", [{"rematerialise": "always"}, {"schedule": "gpipe"}, {"memory": "4GB"}], ids=str)
def test_strategy_options_are_checked_against_the_plan(words: dict[str, Any]) -> None:
    config = RunConfig(task="digits", plan=Path("plan"), **words)
    assert strategy_conflict(config, "pipeline") is None
    assert (strategy_conflict(config, "data") is None) == ("memory" in words)


def test_strategy_conflict_is_returned_without_an_exception() -> None:
    config = RunConfig(task="digits", compile=True)
    assert strategy_conflict(config, "sharded") is None
    assert strategy_conflict(config, "pipeline") == (
        "--compile does not go with --strategy pipeline: it is for others than pipelines"
    )


def test_candidate_strategies_match_the_options() -> None:
    assert candidate_strategies(RunConfig(task="digits"), 1) == ["data"]
    assert candidate_strategies(RunConfig(task="digits", shares="equal"), 3) == ["data"]
    assert candidate_strategies(RunConfig(task="digits", strategy="spatial"), 3) == ["spatial"]
    several = candidate_strategies(RunConfig(task="digits", accumulate=2), 3)
    assert several[0] == "data"
    assert "sharded" in several
    assert not [name for name in several if "pipeline" in name]


def test_config_survives_json() -> None:
    config = RunConfig(task="digits", data=Path("data"), option={"lr": "1"}, output=Path("out"))
    assert decode_config(encode_config(config)) == config
    assert config.checkpoint_folder == Path("out/checkpoints")
    assert RunConfig(task="a/my_task.py", started=0.0).folder.name.startswith("my_task-19700101-")


@pytest.mark.parametrize(
    ("words", "is_elastic"),
    [
        ({}, True),
        ({"strategy": "data"}, True),
        ({"elastic": False}, False),
        ({"strategy": "filter"}, False),
        ({"stationary": True}, False),
        ({"compile": True}, False),
        ({"strategy": "filter", "elastic": True}, True),
    ],
)
def test_run_is_elastic_if_it_only_divides_samples(words: dict[str, Any], is_elastic: bool) -> None:
    assert RunConfig(task="digits", **words).is_elastic is is_elastic
