"""Runs recipes on a master and its uneven nodes, and compares with plain PyTorch.

    PYTHONPATH=src:tests python -m exact.agreed [KIND | KIND/NAME] ... [--agreement sync] [--speeds 1,0.5,0.25]

Master and nodes are threads of this process that talk over a socket; everything else is what `evener train --agreement`
runs: the check before the first step, the job, leases, merging, validation, the record and the weights. With --ranks,
what a master's nodes cannot train under `sync` is trained as `evener train` does then: by three ranks as processes, of
uneven shares.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_model

from evener.commands.engines import torch_backend
from evener.commands.train import perform
from evener.commands.train_by_agreement import check_of, prepare
from evener.config.run_config import RunConfig
from evener.data.loader import collect, seed_all, split_batch
from evener.data.sampler import permutation
from evener.ps.node.engine import Build, EngineSetup, TaskEngine
from evener.ps.node.torch_backend import TorchBackend
from evener.records.errors import EvenerError, NeedsRanks, NotExact, UnknownOptimizer
from evener.tracer.nested import call
from evener.training.context import Arithmetic
from exact.agreed_task import BATCH, EPOCHS, TRAINING, VALIDATION
from exact.agreed_task import task as task_of
from exact.recipe import KINDS, recipe_of, recipes_of
from exact.recipe_task import Samples
from exact.runs import SEED
from exact.verdicts import BY_CHECK, TOLERANCE, VERDICTS, Verdict, off
from support.master_in_threads import Plane, Stand, plane, unpack

SPEEDS = (1.0, 0.5, 0.25)
LIMIT_SECONDS = 40.0
RANK_SHARES = "4,2,1"
DRAW_IN_STEPS = {"optimisers/noisy"}
"""Recipes whose optimizer draws numbers: in a run, other ones than in the loop of plain PyTorch here."""
AGREEMENTS: dict[str, dict[str, Any]] = {
    "sync": {"agreement": "sync"},
    "async": {"agreement": "async"},
    "bounded": {"agreement": "bounded", "staleness": 1},
    "average": {"agreement": "average", "local_steps": "2"},
    "federated": {"agreement": "federated"},
    "diloco": {"agreement": "diloco", "local_steps": "2"},
}


@dataclass(frozen=True)
class Trained:
    """What a run gives.

    Attributes:
        weights: and buffers, by name, as float64.
        losses: of the validations.
    """

    weights: dict[str, np.ndarray[Any, Any]]
    losses: list[float]


class RecipeNode(Stand):
    """A node that trains recipes."""

    def build(self) -> Build:
        return build_engine


class HalfNode(RecipeNode):
    speed = 0.5


class QuarterNode(RecipeNode):
    speed = 0.25


_MAKING = threading.Lock()
"""Nodes are threads here, and share the random numbers of which their models' first weights are made."""


class Hang(Exception):
    """A run did not end in time."""


def build_engine(setup: EngineSetup) -> TaskEngine:
    """The engine of a recipe on a node."""
    torch.set_num_threads(1)
    with _MAKING:
        backend = TorchBackend(task_of(setup.job.title), SEED, Arithmetic("fp64", torch.device("cpu")))
    return TaskEngine(backend, setup)


def whole(reference: str) -> Trained:
    """The same training in plain PyTorch, in one process."""
    recipe, task = recipe_of(reference), task_of(reference)
    seed_all(SEED)
    model = recipe.model().double()
    optimizer = recipe.optimizer(model.parameters())
    training, validation = Samples(recipe, 0, TRAINING), Samples(recipe, 1, VALIDATION)
    losses: list[float] = []
    for epoch in range(EPOCHS):
        order = permutation(TRAINING, SEED, epoch)
        for first in range(0, TRAINING, BATCH):
            model.train()
            inputs, targets = split_batch(collect(training, order[first : first + BATCH], SEED, epoch))
            seed_all(SEED, epoch, first)
            loss = recipe.loss(call(model, inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            if task.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
            optimizer.step()
            model.zero_grad()
        model.eval()
        inputs, targets = split_batch(collect(validation, np.arange(VALIDATION), SEED, 0))
        with torch.no_grad():
            losses.append(float(recipe.loss(call(model, inputs), targets)))
    return Trained({name: tensor.numpy() for name, tensor in model.state_dict().items()}, losses)


def agreed(master: Plane, reference: str, config: RunConfig) -> Trained:
    """The same training by the nodes of a master.

    Raises:
        EvenerError: it was refused, or ended before it was complete.
        Hang: it did not end.
    """
    task = task_of(reference)
    backend: Any = torch_backend(task, config)
    job, blobs = prepare(config, backend, task)
    check_of(config, backend, task, job, lambda _: None)
    until = time.monotonic() + LIMIT_SECONDS

    def in_time() -> None:
        if time.monotonic() > until:
            raise Hang

    with master.control() as control:
        run = control.submit(job, backend.initial_weights(), blobs)
        result = control.watch(run, lambda _: None, in_time)
    if result.error is not None:
        raise Ended(result.reason)
    record, _ = unpack(result)
    backend.write_weights(result.weights, master.folder / "model.safetensors")
    weights = {name: tensor.numpy() for name, tensor in backend.model.state_dict().items()}
    return Trained(weights, [validation.loss for validation in record.validations])


def as_ranks(reference: str, config: RunConfig) -> Trained:
    """The same training by ranks that work together, of uneven shares.

    Raises:
        EvenerError: it was refused, or ended before it was complete.
    """
    with TemporaryDirectory() as folder:
        words = RunConfig(
            task=str(Path(__file__).with_name("agreed_task.py")),
            option={"recipe": reference},
            precision=config.precision,
            seed=config.seed,
            local_nodes="1,0.5,0.25",
            shares=RANK_SHARES,
            patience=LIMIT_SECONDS,
            output=Path(folder),
            quiet=True,
        )
        record = perform(words, quiet=True)
        model = task_of(reference).model().double()
        load_model(model, Path(folder) / "model.safetensors")
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    return Trained(weights, [validation.loss for validation in record.validations])


class Ended(Exception):
    """A run ended by an error on its way."""


def judge(master: Plane, reference: str, agreement: str, *, is_exact: bool, with_ranks: bool = False) -> Verdict:
    """Compare a recipe on a master with one process.

    Args:
        master: with its nodes.
        reference: of the recipe.
        agreement: of the nodes.
        is_exact: whether they have to be equal.
        with_ranks: whether ranks train what the nodes of a master cannot.
    """
    config = RunConfig(task="recipe", precision="fp64", seed=SEED, **AGREEMENTS[agreement])
    try:
        try:
            found = agreed(master, reference, config)
        except (NeedsRanks, UnknownOptimizer):
            if not with_ranks:
                raise
            found = as_ranks(reference, config)
    except NotExact as error:
        return Verdict(reference, agreement, BY_CHECK, str(error))
    except EvenerError as error:
        return Verdict(reference, agreement, "refused by name", str(error))
    except Hang:
        return Verdict(reference, agreement, "hang", "the run did not end")
    except Exception as error:
        return Verdict(reference, agreement, "traceback", f"{type(error).__name__}: {error}"[:300])
    symptom = difference(found, whole(reference)) if is_exact else not_finite(found)
    verdict = "different" if symptom else "equal"
    if symptom and (recipe_of(reference).draws or reference in DRAW_IN_STEPS):
        verdict = "documented"
    return Verdict(reference, agreement, verdict, symptom)


def difference(found: Trained, expected: Trained) -> str:
    """What is not as in one process; empty if all is."""
    if found.weights.keys() != expected.weights.keys():
        return f"state has {sorted(found.weights.keys() ^ expected.weights.keys())[:3]} too many or too few"
    pairs = [(f"validation loss {i}", np.array(one)) for i, one in enumerate(found.losses)]
    pairs += list(found.weights.items())
    right = {f"validation loss {i}": np.array(one) for i, one in enumerate(expected.losses)} | expected.weights
    worst = sorted(((off(torch.tensor(one), torch.tensor(right[name])), name) for name, one in pairs), reverse=True)
    return "; ".join(f"{name} off by {apart:.1e}" for apart, name in worst[:3] if not apart <= TOLERANCE)


def not_finite(found: Trained) -> str:
    """What is not finite; empty if all is."""
    wrong = [name for name, one in found.weights.items() if not np.isfinite(one).all()]
    return f"{wrong[0]} is not finite" if wrong else ""


@contextmanager
def uneven_nodes(num_nodes: int = 3) -> Iterator[Plane]:
    """A master whose nodes are full, half and a quarter as fast."""
    with plane(patience=20.0) as master:
        for name, kind in zip("abc"[:num_nodes], (RecipeNode, HalfNode, QuarterNode), strict=False):
            master.join(name, kind=kind)
        yield master


def judged(names: Sequence[str], agreement: str, num_nodes: int = 3, *, with_ranks: bool = False) -> Iterator[Verdict]:
    """The verdicts of recipes on a master; after a hang another one is started."""
    left = list(names)
    is_exact = agreement == "sync" or num_nodes == 1
    while left:
        with uneven_nodes(num_nodes) as master, collected_by_hand():
            while left:
                verdict = judge(master, left.pop(0), agreement, is_exact=is_exact, with_ranks=with_ranks)
                yield verdict
                gc.collect()
                if verdict.verdict == "hang":
                    break


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """Garbage is not collected by itself inside.

    PyTorch's `get_state` of a generator makes a Python object while it holds the generator's lock. If that starts a
    collection, another thread may take Python's lock and wait for the generator's, and both wait for good. Nodes are
    threads of one process here alone.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=list(KINDS))
    parser.add_argument("--agreement", default="sync", choices=list(AGREEMENTS))
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--ranks", action="store_true", help="ranks train what a master's nodes cannot")
    words = parser.parse_args()
    names = [
        one for what in words.what for one in ([what] if "/" in what else [f"{what}/{r}" for r in recipes_of(what)])
    ]
    begun, found = time.perf_counter(), list[Verdict]()
    for verdict in judged(names, words.agreement, words.nodes, with_ranks=words.ranks):
        found.append(verdict)
        if verdict.verdict != "equal":
            sys.stdout.write(f"{verdict.verdict:20} {verdict.recipe:40} {verdict.symptom[:200]}\n")
            sys.stdout.flush()
    count = Counter(one.verdict for one in found)
    counts = ", ".join(f"{name} {count[name]}" for name in VERDICTS)
    sys.stdout.write(f"\n{words.agreement}: of {len(found)}: {counts}; {time.perf_counter() - begun:.0f} s\n")


if __name__ == "__main__":
    main()
