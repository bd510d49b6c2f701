"""BatchTasks that go on from a checkpoint, on other nodes, train what one process trains without a break."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from evener import BatchTask
from evener.comm.group import Group
from evener.comm.joining import leave_group
from evener.config.run_config import RunConfig
from evener.data.tasks.load import import_file
from evener.frontends.programs.batch_training import BatchTraining
from evener.frontends.programs.entry import end_copy
from evener.frontends.programs.options import ScriptConfig
from evener.frontends.programs.run import Run
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment, run_inprocess
from evener.launch.ranks import run_local
from evener.records.errors import Interrupted, InvalidInput
from evener.training.context import join_world
from support.refusals import refused

KINDS = import_file(Path(__file__).parents[2] / "support_tasks" / "batches.py").KINDS
GOING_ON = ["noisy", "closure", "plateau", "schedule", "long stream"]
"""Of 26 samples in steps of 8: two epochs of 4 steps."""


def task(kind: str, **words: Any) -> BatchTask:
    return BatchTask(**{"name": kind, "batch_size": 8, "epochs": 2, **KINDS[kind], **words})


def train(env: RankEnvironment, group: Group, config: RunConfig, made: BatchTask) -> dict[str, torch.Tensor]:
    run = Run(env, group, ScriptConfig(script=Path("x"), shares=config.shares))
    try:
        training = BatchTraining(run, made, config)
        training.train()
    except BaseException as error:
        end_copy(run, error)
        raise
    end_copy(run, None)
    run.finish()
    run.group.barrier()
    return run.state(training.model)


def rank_of_all(env: RankEnvironment, config: RunConfig) -> None:
    """A rank that trains, or goes on training, a task of every kind."""
    group = join_world(env)
    for kind in GOING_ON:
        own = replace(config, checkpoint=config.folder / kind)
        found = train(env, group, own, task(kind))
        if env.rank == 0:
            torch.save(found, config.folder / f"{kind}.pt")
    leave_group()


def config_of(folder: Path, **words: Any) -> RunConfig:
    folder.mkdir(exist_ok=True)
    return RunConfig(task="x", precision="fp64", output=folder, checkpoint_every="3", check=False, **words)


def in_world(config: RunConfig) -> dict[str, dict[str, torch.Tensor]]:
    nodes = [NodeSpec(name=f"node-{i}", threads=1) for i in range(config.shares.count(",") + 1)]
    run_local(rank_of_all, nodes, config, patience=60, on_event=lambda _: None)
    return {kind: torch.load(config.folder / f"{kind}.pt") for kind in GOING_ON}


def alone(made: BatchTask, config: RunConfig) -> dict[str, torch.Tensor]:
    found: list[dict[str, torch.Tensor]] = []

    def rank(env: RankEnvironment, config: RunConfig) -> None:
        found.append(train(env, join_world(env), config, made))

    run_inprocess(rank, NodeSpec(name="a"), config, patience=60, on_event=lambda _: None)
    return found[0]


def assert_alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-10), (what, name)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_resume_mid_epoch_on_other_nodes_equals_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "nodes"
    in_world(config_of(folder, shares="5,2,0"))
    for kind in GOING_ON:
        kept = sorted(path.name for path in (folder / kind).glob("step-*"))
        last = f"step-{4 * task(kind).epochs:08d}"
        assert kept[-1] == last, kind
        shutil.rmtree(folder / kind / last)
    resumed = in_world(config_of(folder, shares="1,3", resume=True))
    for kind in GOING_ON:
        assert_alike(resumed[kind], alone(task(kind), config_of(tmp_path / kind.replace(" ", "-"))), kind)


def test_resume_continues_where_a_stop_request_ended_the_run(tmp_path: Path) -> None:
    expected = alone(task("noisy"), config_of(tmp_path / "whole"))
    config = config_of(tmp_path / "parts")
    environments: list[RankEnvironment] = []

    def stopping(model: torch.nn.Module, batch: Any) -> Any:
        loss = KINDS["noisy"]["loss"](model, batch)
        steps.append(float(loss.detach()))
        if len(steps) == 2:
            environments[0].request_stop()
        return loss

    def rank(env: RankEnvironment, config: RunConfig) -> None:
        environments.append(env)
        train(env, join_world(env), config, task("noisy", loss=stopping))

    steps: list[float] = []
    with refused(Interrupted):
        run_inprocess(rank, NodeSpec(name="a"), config, patience=60, on_event=lambda _: None)
    assert len(steps) < 8
    assert_alike(alone(task("noisy"), replace(config, resume=True)), expected, "noisy")


def test_resuming_a_complete_run_trains_no_step(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    expected = alone(task("schedule"), config)
    assert_alike(alone(task("schedule"), replace(config, resume=True)), expected, "schedule")


def test_invalid_resume_settings_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    alone(task("schedule"), config)
    with refused(InvalidInput):
        alone(task("schedule"), config)
    with refused(InvalidInput):
        alone(task("schedule", epochs=1), replace(config, resume=True))
    with refused(InvalidInput):
        alone(task("schedule", batch_size=4), replace(config, resume=True))
    with refused(InvalidInput):
        alone(task("stream"), config_of(tmp_path / "stream"))
