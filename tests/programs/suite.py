"""Runs programs as they were and with their changed lines, many in one world: `python -m programs` prints the table.

A program is one file in `scripts/`. What was changed in it is marked, so that the plain one can be made of it:

    run = evener.join()               # added
    for epoch in run.epochs(3):       # was: for epoch in range(3):
"""

from __future__ import annotations

import contextlib
import io
import random
import re
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from evener.comm.joining import leave_group
from evener.frontends.programs import entry
from evener.frontends.programs.options import ScriptConfig
from evener.frontends.programs.run import Run
from evener.launch.nodes import NodeSpec
from evener.launch.rank_environment import RankEnvironment
from evener.launch.ranks import run_local
from evener.records.errors import EvenerError
from evener.training.context import join_world
from programs.cells import program_of

import_module("torchvision_operators")  # before a program imports torchvision
SCRIPTS = Path(__file__).parent / "scripts"


class World(NamedTuple):
    """Nodes on which programs are run.

    Attributes:
        shares: of the nodes.
        strategy: what they divide.
    """

    shares: str
    strategy: str = "auto"


WORLDS = {
    "nodes 1": World("1"),
    "nodes 3:1": World("3,1"),
    "nodes 5:2:0": World("5,2,0"),
    "sharded": World("3,1", "sharded"),
    "spatial": World("3,1", "spatial"),
}
"""By how they are called in tables."""
_NEEDS = re.compile(r"^# needs: (\w+)$", re.MULTILINE)
_MARK = re.compile(r"\s*# (added$|was: (?P<was>.*)$)")


class Outcome(NamedTuple):
    """What a program came to.

    Attributes:
        values: what it left in `results`.
        sentence: with which it was refused, or failed.
        is_refused: whether that was on purpose.
    """

    values: dict[str, torch.Tensor]
    sentence: str = ""
    is_refused: bool = False


def names() -> list[str]:
    """Of all programs whose packages are installed."""
    return sorted(path.stem for path in SCRIPTS.glob("*.py") if has_needed(path.read_text()))


def has_needed(text: str) -> bool:
    """Whether a program can run here: `# needs: PACKAGE` says what dev does not install."""
    needed = _NEEDS.search(text)
    return needed is None or find_spec(needed[1]) is not None


def source(name: str) -> str:
    """A program with its changed lines: a script, or a cell of `published/`, whose name has a dot."""
    return program_of(name) if "." in name else (SCRIPTS / f"{name}.py").read_text()


def plain(text: str) -> str:
    """The program as it was."""
    lines = []
    for line in text.splitlines():
        mark = _MARK.search(line)
        if mark is None:
            lines.append(line)
        elif mark["was"] is not None:
            lines.append(line[: len(line) - len(line.lstrip())] + mark["was"])
    return "\n".join(lines) + "\n"


def changed_lines(text: str) -> int:
    """Lines of a program that are not as they were; the import is one."""
    return sum(_MARK.search(line) is not None for line in text.splitlines())


def perform(text: str, name: str) -> Outcome:
    """Run a program here, from a fixed seed in float64; what it leaves in `results`."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    torch.set_default_dtype(torch.float64)
    space: dict[str, Any] = {"__name__": "__main__"}
    argv, sys.argv = sys.argv, [name]
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages among each other
            exec(compile(text, str(SCRIPTS / f"{name}.py"), "exec"), space)
    finally:
        sys.argv = argv
        torch.set_default_dtype(torch.float32)
    return Outcome({key: value.detach().clone() for key, value in space["results"].items()})


def run_of(env: RankEnvironment, shares: str) -> Run:
    """The run that the program joins which this rank performs next."""
    run = Run(env, join_world(env), ScriptConfig(script=Path("program.py"), shares=shares))
    entry._runs[:] = [run]
    return run


def rank_of_suite(env: RankEnvironment, work: tuple[str, str, Sequence[str], str]) -> None:
    """A rank that performs some programs one after the other; the leader writes what came of them."""
    shares, strategy, chosen, folder = work
    group = join_world(env)
    for name in chosen:
        config = ScriptConfig(script=Path(f"{name}.py"), shares=shares, strategy=strategy)
        run = Run(env, group, config)
        entry._runs[:] = [run]
        with contextlib.ExitStack() as stack:
            stack.push(partial(_end_copy, run))
            try:
                outcome = perform(source(name), name)
            except EvenerError as error:
                if run.equivalence_check.replica is not None:
                    raise
                outcome = Outcome({}, str(error), is_refused=True)
        run.finish()
        if group.is_leader:
            torch.save(tuple(outcome), Path(folder) / f"{name}.pt")
    group.barrier()
    leave_group()


def _end_copy(run: Run, _kind: object, error: BaseException | None, _trace: object) -> None:
    """End a forked replica."""
    copy = run.equivalence_check.replica
    if copy is not None and error is None:
        copy.end()
    if copy is not None and error is not None:
        copy.fail(error)


def in_world(world: World, chosen: Sequence[str], folder: Path) -> dict[str, Outcome]:
    """What programs come to there."""
    folder.mkdir(parents=True, exist_ok=True)
    nodes = [NodeSpec(name=f"node-{i}", threads=1) for i in range(world.shares.count(",") + 1)]
    work = (*world, list(chosen), str(folder))
    run_local(rank_of_suite, nodes, work, patience=60.0, on_event=lambda _: None)
    return {name: outcome_in(folder, name) for name in chosen}


def outcome_in(folder: Path, name: str) -> Outcome:
    """What a program came to, as the leader of a world wrote it."""
    return Outcome(*torch.load(folder / f"{name}.pt"))


def off(found: Outcome, expected: Outcome) -> float:
    """The largest difference of all values, relative to the largest value of each, at least 1."""
    assert found.values.keys() == expected.values.keys()
    return max(
        float((found.values[key].double() - value.double()).abs().max()) / max(1.0, float(value.abs().max()))
        for key, value in expected.values.items()
    )
