"""BatchTasks of every kind: on uneven nodes they train what they train alone, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from evener import BatchTask
from evener.comm.joining import leave_group
from evener.config.run_config import RunConfig
from evener.data.tasks.load import import_file, load_task
from evener.frontends.programs.batch_training import BatchTraining, _collate, refuse_batches
from evener.frontends.programs.calling import train_command
from evener.frontends.programs.entry import end_copy
from evener.frontends.programs.options import ScriptConfig
from evener.frontends.programs.run import Run
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment, run_inprocess
from evener.launch.ranks import run_local
from evener.records.errors import EvenerError, InvalidInput, InvalidValue, place_of
from evener.training.context import join_world
from support.commands import evener, last_json
from support.refusals import refused

BATCHES = str(Path(__file__).parents[2] / "support_tasks" / "batches.py")
_MODULE = import_file(Path(BATCHES))
KINDS, task = _MODULE.KINDS, _MODULE.task


QUICK = ["count", "ratio", "miscounted", "sum", "coin", "stream"]


def rank_of_all(env: RankEnvironment, work: tuple[str, str, list[str]]) -> None:
    """A rank that trains a task of every kind, one after the other; the leader writes what came of them."""
    shares, folder, kinds = work
    group = join_world(env)
    for kind in kinds:
        config = RunConfig(task=kind, precision="fp64", shares=shares, output=Path(folder) / kind)
        run = Run(env, group, ScriptConfig(script=Path(kind), shares=shares))
        found: Any
        try:
            training = BatchTraining(run, task(kind), config)
            training.train()
            end_copy(run, None)
            record = run.finish(task=kind)
            assert record is not None
            found = run.state(training.model), [(v.loss, v.accuracy, v.metrics) for v in record.validations]
        except EvenerError as error:
            end_copy(run, error)
            found = str(error), None
            run.finish()
        except BaseException as error:
            end_copy(run, error)
            raise
        if group.is_leader:
            torch.save(found, Path(folder) / f"{kind}.pt")
    group.barrier()
    leave_group()


def trained(shares: str, folder: Path, kinds: list[str]) -> dict[str, Any]:
    folder.mkdir()
    nodes = [NodeSpec(name=f"node-{i}", threads=1) for i in range(shares.count(",") + 1)]
    if len(nodes) == 1:
        run_inprocess(rank_of_all, nodes[0], ("1", str(folder), kinds), patience=60, on_event=lambda _: None)
    else:
        run_local(rank_of_all, nodes, (shares, str(folder), kinds), patience=60, on_event=lambda _: None)
    return {kind: torch.load(folder / f"{kind}.pt") for kind in kinds}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained("1", tmp_path_factory.mktemp("alone") / "1", list(KINDS))


@pytest.mark.parametrize(
    ("shares", "kinds"),
    [
        ("3,1", QUICK),
        pytest.param("3,1", list(KINDS), marks=pytest.mark.slow),
        pytest.param("5,2,0", list(KINDS), marks=pytest.mark.slow),
    ],
)
def test_batch_task_kinds_equal_one_process_or_are_refused(
    shares: str, kinds: list[str], tmp_path: Path, alone: dict[str, Any]
) -> None:
    found = trained(shares, tmp_path / "nodes", kinds)
    for kind in kinds:
        weights, validations = found[kind]
        if kind == "miscounted":
            assert "a mean over something else than samples" in weights
            continue
        expected, known = alone[kind]
        assert not isinstance(weights, str), (kind, weights)
        for name, tensor in expected.items():
            assert torch.allclose(weights[name], tensor, rtol=0, atol=1e-10), (kind, name)
        assert len(validations) == len(known), kind
        for (loss, accuracy, metrics), (loss_alone, accuracy_alone, metrics_alone) in zip(
            validations, known, strict=True
        ):
            assert loss == pytest.approx(loss_alone, rel=1e-9), kind
            assert accuracy == pytest.approx(accuracy_alone), kind
            assert metrics == pytest.approx(metrics_alone), kind


def rank_with_metric(env: RankEnvironment, folder: str) -> None:
    """A rank that writes how a metric was refused that is no mean over samples."""
    words = KINDS["count"] | {
        "batch_size": 8,
        "epochs": 1,
        "metrics": {"largest": lambda _, batch: batch["words"].max()},
    }
    run = Run(env, join_world(env), ScriptConfig(script=Path("x"), shares="3,1"))
    try:
        BatchTraining(run, BatchTask(**words), RunConfig(task="x", precision="fp64", output=Path(folder))).train()
    except InvalidInput as error:
        Path(folder, f"{env.rank}.txt").write_text(str(error))
        raise


def test_metric_that_is_not_a_sample_mean_is_refused_on_nodes(tmp_path: Path) -> None:
    nodes = [NodeSpec(name=f"node-{i}", threads=1) for i in range(2)]
    with pytest.raises(EvenerError):
        run_local(rank_with_metric, nodes, str(tmp_path), patience=30, on_event=lambda _: None)
    said = [path.read_text() for path in sorted(tmp_path.glob("*.txt"))]
    assert len(said) == 2
    assert ["BatchTask.metrics['largest'] is " in sentence for sentence in said] == [True, True], said


def test_validation_covers_all_samples(alone: dict[str, Any]) -> None:
    assert len(alone["plateau"][1]) == 4
    for kind in ("count", "ratio"):
        loss, accuracy, metrics = alone[kind][1][-1]
        assert 0 < accuracy < 1
        assert metrics == {"sentences": 1.0}
        assert loss > 0
    assert alone["count"][1][-1][0] == pytest.approx(alone["ratio"][1][-1][0])
    assert alone["validate"][1][-1][2] == {"rows": 12.0}


@pytest.mark.slow
def test_train_command_trains_a_batch_task_file(tmp_path: Path) -> None:
    words = ("train", BATCHES, "--option", "kind=ratio", "--local-nodes", "1,0.5", "--precision", "fp64", "--json")
    summary = last_json(evener(*words, "--output", "out", cwd=tmp_path))
    assert summary["validation_accuracy"] > 0.05
    assert {"record.json", "plan.json", "model.safetensors"} <= {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"accumulate": 2}, "--accumulate does not go with a BatchTask: its batches are divided, and nothing else"),
        ({"elastic": True}, "--elastic does not go with a BatchTask: its optimiser may change weights several times"),
        ({"strategy": "pipeline"}, "--strategy pipeline does not go with a BatchTask"),
        ({"precision": "fp16"}, "--precision fp16 does not go with a BatchTask: take bf16"),
    ],
)
def test_options_incompatible_with_batch_tasks_are_refused(words: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        refuse_batches(RunConfig(task="x", **words))
    assert sentence in str(refused.value)


@pytest.mark.parametrize("words", [{"accumulate": 2}, {"elastic": True}, {"strategy": "pipeline"}])
def test_rank_of_torchrun_refuses_options_incompatible_with_batch_tasks(
    words: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with refused(InvalidInput):
        train_command(RunConfig(task=BATCHES, **words), as_json=False)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"loss": None}, "BatchTask.loss must be a function, got None"),
        ({"count": "tokens"}, "BatchTask.count must be 'samples', 'sum' or a function of a batch, got 'tokens'"),
        ({"metrics": ["accuracy"]}, "BatchTask.metrics must be a dict from names to functions, got ['accuracy']"),
        (
            {"metrics": {3: len}},
            "BatchTask.metrics must be a dict from names to functions, got {3: <built-in function len>}",
        ),
        ({"metrics": {"one": 1}}, "BatchTask.metrics['one'] must be a function of the model and a batch, got 1"),
        ({"validation_data": None}, "BatchTask.validation_data must be a function where there are metrics, got None"),
        ({"epochs": 0}, "BatchTask.epochs must be a positive whole number, got 0"),
    ],
)
def test_invalid_batch_task_arguments_are_refused(words: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        BatchTask(**{**KINDS["count"], **words})
    assert str(refused.value) == sentence


class Numbered(torch.utils.data.Dataset[Any]):
    """Samples by number, which does not say how many there are."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("nobody reads it")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"loss": lambda model, batch: model(batch[0])}, "must return a scalar, or a numerator and a denominator"),
        ({"train_data": Numbered}, "Numbered has no len"),
        ({"validation_data": Numbered}, "Numbered has no len"),
        ({"validate": lambda model, run: {"rows": 1}}, "must return a loss, too, where there is no validation_data"),
        ({"validate": lambda model, run: 3}, "BatchTask.validate must be a function that returns"),
        ({"validate": lambda model, run: {"loss": "x"}}, r"BatchTask.validate\['loss'\]"),
        (
            {"metrics": {"a": lambda *_: "x"}, "validation_data": KINDS["schedule"]["train_data"]},
            r"BatchTask.metrics\['a'\]",
        ),
        (
            {"metrics": {"a": lambda *_: (1, 2, 3)}, "validation_data": KINDS["schedule"]["train_data"]},
            r"BatchTask.metrics\['a'\] must be a function that returns a mean, or a sum and a number",
        ),
        (
            {**KINDS["stream"], "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR},
            "the data are a stream without a length: give their class a __len__",
        ),
    ],
)
def test_untrainable_batch_tasks_are_refused_in_one_sentence(words: dict[str, Any], sentence: str) -> None:
    def rank(env: RankEnvironment, config: RunConfig) -> None:
        run = Run(env, join_world(env), ScriptConfig(script=Path("x")))
        BatchTraining(run, BatchTask(**{**KINDS["schedule"], "batch_size": 8, **words}), config).train()

    with pytest.raises(InvalidInput, match=sentence):
        run_inprocess(rank, NodeSpec(name="a"), RunConfig(task="x"), patience=30, on_event=lambda _: None)


def test_collate_error_names_the_remedy() -> None:
    with pytest.raises(RuntimeError) as caught:
        _collate([torch.ones(4), torch.ones(5)])
    assert "without a BatchTask.collate" in place_of(caught.value)


def test_load_task_refuses_a_batch_task_file(tmp_path: Path) -> None:
    with refused(InvalidInput):
        load_task(BATCHES)
