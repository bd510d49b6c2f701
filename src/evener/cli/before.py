"""Messages and refusals of a command before PyTorch is loaded, which takes seconds."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from evener.config.run_config import RunConfig
from evener.launch.rank_variables import is_rank, require_rank_variables, require_secret
from evener.launch.slurm import adopt_slurm
from evener.records.errors import InvalidInput, MissingFile, TrainingFailed, nearest
from evener.system.sign_of_life import sign_of_life
from evener.training.checkpoint_folder import require_checkpoint

STARTING = "starting: loading what is needed"


def tell(line: str, as_json: bool, *, quiet: bool = False) -> None:
    """Print a sign of life; of several ranks that torchrun starts on a machine, the first one does."""
    number_here = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    if quiet or "torch" in sys.modules or number_here != "0":
        return
    stream = sys.stderr if as_json else sys.stdout
    stream.write(line + "\n")
    stream.flush()


@contextmanager
def loading(as_json: bool, *, quiet: bool = False, line: str = STARTING) -> Iterator[None]:
    """Print `line`, and again every few seconds while what is inside, such as an import, takes its time."""
    tell(line, as_json, quiet=quiet)
    if "torch" in sys.modules:
        yield
        return
    stream = sys.stderr if as_json else sys.stdout
    is_told = not quiet and os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"

    def say(text: str) -> None:
        if is_told:
            stream.write(text + "\n")
            stream.flush()

    with sign_of_life(say, line):
        yield


def adopt_launcher() -> None:
    """Take over what Slurm says of this process, and check what it or torchrun says.

    Raises:
        InvalidInput: a variable of a rank is missing or wrong, or the ranks have no secret.
    """
    adopt_slurm(os.environ)
    if is_rank(os.environ):
        require_rank_variables(os.environ)
        require_secret(os.environ)


def require_files(config: RunConfig) -> None:
    """Raise an error for a file, data set or checkpoint that a training lacks, and for a master that refuses runs."""
    if config.resume:
        require_checkpoint(config.checkpoint_folder)
    if config.plan is not None:
        from evener.records.plan import Plan
        from evener.records.schema import read_noun

        read_noun(config.plan, Plan)
    if config.system is not None and config.local_nodes is None:
        from evener.ps.protocol.system import read_system

        read_system(config.system)
    if (config.agreement is not None and config.local_nodes is None) or config.has_ranks_on_master:
        from evener.commands.up import require_submitter

        require_submitter(config)
    elif config.task in ("mnist", "nfnn"):
        from evener.data.mnist import MNIST_FOLDER, require_mnist

        require_mnist(config.data or MNIST_FOLDER)


def require_program(script: Path) -> None:
    """Check the file of `evener run`.

    Raises:
        MissingFile: it is not there.
        TrainingFailed: it is not Python.
        InvalidInput: it is an option, or it defines a task and does not train.
    """
    if str(script).startswith("--"):
        hint = "; a master trains tasks: `evener train my_task.py --master ...`" if str(script) == "--master" else ""
        raise InvalidInput(f"`evener run` has no option {script}: name your program before options of its own{hint}")
    if not script.is_file():
        raise MissingFile(f"{script} is not there: name the file of your program")
    try:
        tree = ast.parse(script.read_bytes(), script)
    except SyntaxError as error:
        where = "" if error.lineno is None else f" line {error.lineno}"
        raise TrainingFailed(f"{script}{where}: SyntaxError: {error.msg}") from error
    if _is_task_alone(tree):
        raise InvalidInput(
            f"{script} defines a task, which `evener run` would not train, as it runs programs: type "
            f"`evener train {script}`"
        )


def passed_options(script: Path, arguments: Sequence[str], fields: Iterable[str]) -> str:
    """Return a line that names the options which `evener run` passes to the program; empty if there are none."""
    known = [f"--{name.replace('_', '-')}" for name in fields if name not in ("script", "arguments", "started")]
    names = [argument.partition("=")[0] for argument in arguments if argument.startswith("--") and argument != "--"]
    if not names:
        return ""
    line = f"passing to {script.name}: {', '.join(name + nearest(name, known, similarity=0.85) for name in names)}"
    return f"{line}; the nodes are of this machine, as a master trains tasks only" if "--master" in names else line


def _is_task_alone(tree: ast.Module) -> bool:
    """Whether a file defines a `task`, and calls nothing that trains."""
    names = {
        name.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for name in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(name, ast.Name)
    }
    names |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    called = {
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    trains = {"join", "train", "backward", "fit", "prepare"}
    return "task" in names and bool(called & {"Task", "BatchTask", "ThinTask"}) and not called & trains
