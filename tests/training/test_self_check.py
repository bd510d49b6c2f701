"""A run checks before its first step that it trains like a single process."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evener.config.run_config import RunConfig
from evener.records.errors import InvalidInput, NotExact
from evener.records.plan import Rejected
from evener.training import rank
from evener.training.planning import choose
from support.commands import evener, evener_here
from support.refusals import refused

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from evener import Task

{plant}

def model():
    return {model}

def loss(outputs, targets):
    return {loss}

def data():
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(48, 3, 6, 6, generator=draw), torch.randint(0, 3, (48,), generator=draw))

def task():
    return Task(model=model, loss=loss, train_data=data, batch_size=16, {options})
"""
NETWORK = "nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3))"
MEAN = "F.cross_entropy(outputs, targets)"


def train(folder: Path, *words: str, plant: str = "", model: str = NETWORK, loss: str = MEAN, options: str = "") -> str:
    """The sentence with which a run is refused; empty if it trains."""
    (folder / "my_task.py").write_text(TASK.format(plant=plant, model=model, loss=loss, options=options))
    nodes = ("--local-nodes", "1,1,1") if "--local-nodes" not in words else ()
    run = evener if plant else evener_here  # a plant changes Evener's own code
    result = run("train", "my_task.py", *nodes, "--output", "out", *words, cwd=folder)
    assert "Traceback" not in result.stderr, result.stderr
    assert result.returncode in (0, 2), result.stderr
    return result.stderr.strip().splitlines()[-1] if result.returncode else ""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data", "sharded", "pipeline"])
def test_checked_values_appear_in_the_plan_and_on_the_terminal(tmp_path: Path, strategy: str) -> None:
    shares = () if strategy == "pipeline" else ("--shares", "7,2,1")
    assert train(tmp_path, "--strategy", strategy, *shares, options="clip_norm=1.0") == ""
    check = json.loads((tmp_path / "out" / "plan.json").read_text())["check"]
    assert check["precisions"] == ["fp32", "fp64"]
    assert check["off"] < 1e-9
    assert check["samples"] == ([4, 2, 1] if strategy == "data" else [2] if strategy == "pipeline" else [4])


@pytest.mark.parametrize(
    "loss",
    [
        "F.cross_entropy(outputs, targets, reduction='sum')",
        pytest.param(
            "F.cross_entropy(outputs, targets, weight=torch.tensor([1., 5., 20.], dtype=outputs.dtype))",
            marks=pytest.mark.slow,
        ),
        pytest.param("(outputs @ outputs.t()).logsumexp(1).mean()", marks=pytest.mark.slow),
    ],
)
def test_loss_that_is_not_a_sample_mean_is_refused(tmp_path: Path, loss: str) -> None:
    sentence = train(tmp_path, "--strategy", "data", "--shares", "5,0,3", loss=loss)
    assert sentence.startswith("evener: --strategy data divides the samples, but the loss of a batch is no mean over")
    assert "differs by a factor of" in sentence


@pytest.mark.slow
def test_loss_that_counts_its_calls_is_refused_with_that_reason(tmp_path: Path) -> None:
    counting = f"calls.append(0) or {MEAN} / len(calls)"
    words = ("--local-nodes", "1,1", "--shares", "1,1", "--strategy", "data")
    sentence = train(tmp_path, *words, loss=counting, plant="calls = []")
    assert "the loss changes from call to call" in sentence


@pytest.mark.slow
def test_no_check_option_trains_without_the_check(tmp_path: Path) -> None:
    assert train(tmp_path, "--strategy", "data", "--no-check", loss="F.cross_entropy(outputs, targets).sqrt()") == ""


TWO_NORMS = (
    "nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 1, bias=False), nn.BatchNorm2d(6), "
    "nn.Flatten(), nn.Linear(96, 3))"
)


SHUFFLE = """
class Shuffle(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(3, 3, 3, padding=1, groups=3, bias=False), nn.BatchNorm2d(3),
            nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3), nn.ReLU(),
        )
    def forward(self, x):
        left, right = x.chunk(2, 1)
        return torch.stack([left, self.branch(right)], 2).flatten(1, 2)
"""
SHUFFLE_NET = (
    "nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), Shuffle(), Shuffle(), "
    "nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (TWO_NORMS, MEAN),  # the second mean is that of values that cancel out
        (SHUFFLE_NET, MEAN),
        (NETWORK, "F.cross_entropy(outputs.float(), targets)"),
    ],
)
def test_rounding_errors_are_not_mistaken_for_differences(tmp_path: Path, model: str, loss: str) -> None:
    words = ("--strategy", "data", "--precision", "fp64", "--local-nodes", "1,1", "--shares", "3,1")
    assert train(tmp_path, *words, plant=SHUFFLE if "Shuffle" in model else "", model=model, loss=loss) == ""


@pytest.mark.slow
def test_loss_between_samples_passes_where_ranks_have_whole_batches(tmp_path: Path) -> None:
    loss = "(outputs @ outputs.t()).logsumexp(1).mean()"
    assert train(tmp_path, "--strategy", "filter", loss=loss) == ""


UNSUMMED = """
from evener.parallel import replicated
def unsummed(group, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
replicated.sum_bucket = unsummed
"""
OWN_STATISTICS = """
from evener.training import joined_model
from evener.parallel.shared_statistics import SharedStatistics
joined_model.synchronise_norms = lambda model, *_: model
SharedStatistics.__torch_function__ = lambda self, func, types, args=(), kwargs=None: func(*args, **(kwargs or {}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("plant", [UNSUMMED, OWN_STATISTICS])
def test_planted_defects_are_detected(tmp_path: Path, plant: str) -> None:
    sentence = train(tmp_path, "--strategy", "data", "--shares", "5,2,1", plant=plant)
    assert "would not train like a single process" in sentence


FAILS_ON_ONE_RANK = """
import torch.distributed as dist
from evener.training.trial import Trial
divided = Trial.divided
def fails(trial):
    if dist.get_rank() == 1:
        raise ZeroDivisionError("planted")
    return divided(trial)
Trial.divided = fails
"""


@pytest.mark.slow
def test_failure_on_one_rank_ends_the_run_while_others_wait(tmp_path: Path) -> None:
    words = ("--strategy", "data", "--shares", "5,2,1", "--patience", "8")
    sentence = train(tmp_path, *words, plant=FAILS_ON_ONE_RANK)
    assert "--strategy data cannot train this model" in sentence
    assert "ZeroDivisionError: planted" in sentence


WAITS_FOR_OTHERS = """
import torch.distributed as dist
from evener.training import self_check
from evener.training.trial import Trial
self_check._WAIT, self_check._BUDGETS, self_check._WHOLES = 4.0, 0.0, 0.0
divided = Trial.divided
def waits(trial):
    if dist.get_rank() == 1:  # for a tensor that nobody sends; the others wait for what it does not send
        dist.recv(torch.zeros(1), src=0)
    return divided(trial)
Trial.divided = waits
"""


@pytest.mark.slow
def test_deadlocked_ranks_end_the_run_in_time(tmp_path: Path) -> None:
    sentence = train(tmp_path, "--strategy", "data", "--shares", "5,2,1", plant=WAITS_FOR_OTHERS)
    assert "--strategy data cannot train this model: in the check before the first step node" in sentence
    assert "waited 4 s for the others" in sentence


def test_auto_skips_a_strategy_that_raises_and_a_named_one_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise InvalidInput("no")

    monkeypatch.setattr(rank, "make_training", refuse)
    monkeypatch.setattr(rank, "copied", lambda model: model)
    monkeypatch.setattr(rank, "replace", lambda context, **_: context)
    context: Any = SimpleNamespace(model=None, user_plan=None, env=SimpleNamespace(device="cpu"))
    assert rank.checked(context, None, RunConfig(task="digits")) == (None, "no")  # type: ignore[arg-type]
    with refused(InvalidInput):
        rank.checked(context, None, RunConfig(task="digits", strategy="data"))  # type: ignore[arg-type]


def test_auto_tries_no_other_strategy_on_a_full_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise InvalidInput("no") from RuntimeError("CUDA out of memory")

    monkeypatch.setattr(rank, "make_training", refuse)
    monkeypatch.setattr(rank, "copied", lambda model: model)
    monkeypatch.setattr(rank, "replace", lambda context, **_: context)
    context: Any = SimpleNamespace(model=None, user_plan=None, env=SimpleNamespace(device="cuda:0"))
    with pytest.raises(InvalidInput) as raised:
        rank.checked(context, None, RunConfig(task="digits"))  # type: ignore[arg-type]
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_auto_tries_the_next_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies, asked = ["data", "filter"], []

    def make_plan(_context: Any, _config: RunConfig, refused: list[Rejected]) -> Any:
        asked.append([one.what for one in refused])
        return SimpleNamespace(strategy=strategies[len(refused)])

    def checked(_context: Any, plan: Any, _config: RunConfig) -> tuple[str | None, str]:
        return (None, "it is off") if plan.strategy == "data" else (plan.strategy, "")

    context = SimpleNamespace(
        env=SimpleNamespace(nodes=[None, None], patience=1.0),
        user_plan=None,
        group=SimpleNamespace(
            reports=SimpleNamespace(all_gather=lambda row: [b"", row], within=lambda _: nullcontext())
        ),
        of_plan=lambda plan: plan,
    )
    monkeypatch.setattr(rank, "make_plan", make_plan)
    monkeypatch.setattr(rank, "checked", checked)
    monkeypatch.setattr(rank, "plan_of_fewer", lambda *_: None)
    monkeypatch.setattr(rank, "_refuse_lone_sample", lambda *_: None)
    monkeypatch.setattr(rank, "explained", lambda training, _: training)
    assert rank.prepare(context, RunConfig(task="digits")) == "filter"  # type: ignore[arg-type,comparison-overlap]
    assert asked == [[], ["data"]]
    strategies[1] = "data"
    with refused(NotExact):
        rank.prepare(context, RunConfig(task="digits", strategy="data"))  # type: ignore[arg-type]


def test_first_remaining_strategy_is_chosen_without_estimates() -> None:
    assert choose(["filter", "channel"], "", []) == "filter"
