"""A step of Slurm's, as srun starts it, is a run of its tasks: tables, and two processes with its variables."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from evener.launch.slurm import adopt_slurm, first_host, slurm_variables, tasks_per_node
from evener.records.errors import InvalidValue
from support.commands import TINY, command, evener
from support.sockets import free_port

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2,3",
    "SLURM_JOB_NODELIST": "gpu[01-08]",
}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("one", "one"),
        ("one,two", "one"),
        ("gpu[03-05,9],login", "gpu03"),
        ("gpu[9,11]", "gpu9"),
        ("rack[1-2]n[7,8]", "rack1n7"),
        ("a-b.example.org", "a-b.example.org"),
    ],
)
def test_first_host_of_a_list_is_found(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("text", "tasks"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2)", [1, 2, 2]), ("", []), ("odd", [])]
)
def test_tasks_per_node_are_parsed(text: str, tasks: list[int]) -> None:
    assert tasks_per_node(text) == tasks


def test_task_of_a_step_is_a_rank() -> None:
    assert slurm_variables(STEP) == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(10_000 + 31 * 17 + 2),
    }


def test_each_step_and_job_has_its_own_port() -> None:
    ports = {
        slurm_variables({**STEP, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})["MASTER_PORT"]
        for job in range(100, 120)
        for step in range(4)
    }
    assert len(ports) == 80


@pytest.mark.parametrize("lacking", [{"SLURM_STEP_NUM_TASKS": ""}, {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_PROCID": ""}])
def test_batch_script_and_single_task_are_no_ranks(lacking: dict[str, str]) -> None:
    assert slurm_variables({**STEP, **lacking}) == {}


@pytest.mark.parametrize("wrong", [{"SLURM_STEP_NUM_TASKS": "x"}, {"SLURM_PROCID": "first"}, {"SLURM_LOCALID": "-1"}])
def test_invalid_step_numbers_are_rejected(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidValue):
        slurm_variables({**STEP, **wrong})


def test_huge_task_list_takes_no_memory() -> None:
    assert tasks_per_node("1(x99999999999)") == []


def test_torchrun_and_user_variables_take_precedence() -> None:
    torchrun = {**STEP, "RANK": "0", "WORLD_SIZE": "2"}
    adopt_slurm(torchrun)
    assert torchrun == {**STEP, "RANK": "0", "WORLD_SIZE": "2"}
    named = {**STEP, "MASTER_ADDR": "10.0.0.1"}
    adopt_slurm(named)
    assert (named["MASTER_ADDR"], named["RANK"]) == ("10.0.0.1", "3")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_slurm_tasks_equal_one_process(tmp_path: Path) -> None:
    words = ["train", TINY, "--precision", "fp64", "--seed", "3"]
    assert evener(*words, "--output", "alone", "--devices", "cpu", cwd=tmp_path).returncode == 0
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    step = {
        **environment,
        "SLURM_JOB_ID": str(time.time_ns() % 10**6),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "MASTER_PORT": str(free_port()),
    }
    tasks = [
        subprocess.Popen(
            command(*words, "--output", "ranks", "--shares", "2,1"),
            cwd=tmp_path,
            env={**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [task.communicate(timeout=200)[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    assert [task.returncode for task in tasks] == [0, 0], said
    assert "starting: " in said[0]
    assert "starting: " not in said[1]
    alone, ranks = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "ranks"))
    assert max(float((alone[name] - ranks[name]).abs().max()) for name in alone) < 1e-10
