"""A search over local nodes of 1 : 0.5 : 0.25: how near to the ideal it ends, what a trial costs, what it finds.

    python benchmarks/tune.py [--parts makespan,joining,overhead,same,thin,yolo,yolo-master] [--trials 50,12]
                              [--seconds 16] [--data MNIST] [--json]

The ideal is all work divided by the summed speed. A step idles for as long as it would take a node of its speed, so
that three of them fit two cores, also beside strangers. PyTorch is loaded before the clock starts. `overhead` is a
search whose trials are one step each: all its seconds are overhead. `same` compares the trials of a pruned search on
one node and on three. `yolo` searches for settings of a classifier of Ultralytics, whose batches idle in the same way;
a trial is computing, too, so its ideal is that of nodes as fast as each is with a trial alone, measured just before.
`yolo-master` does the same on three nodes of a master.
`thin` searches the task `nfnn` with every process bound to one core and 1 GB of address space.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from results import Results, open_results, parser_of
from tune_task import Sleeper

from evener.launch.processes import RANK_MODULES
from evener.launch.rank_environment import RankEnvironment
from evener.ps.client import MasterClient, find_master
from evener.ps.protocol.config import StateDir
from evener.search.command import search_for, tune
from evener.search.options import TuneConfig

TASK = str(Path(__file__).with_name("tune_task.py"))
SPEEDS = (1.0, 0.5, 0.25)
NODES = ",".join(map(str, SPEEDS))
EPOCHS, STEPS = 8, 5
VARY = ("lr=1e-3..1:log",)
GB = 10**9


def search(folder: Path, **options: Any) -> tuple[float, Any]:
    """Seconds of a search, and what it found."""
    config = TuneConfig(**{"task": TASK, "vary": VARY, "output": folder, "metric": "loss", **options})
    begun = time.perf_counter()
    with redirect_stdout(sys.stderr):
        tune(config, as_json=True)
    return time.perf_counter() - begun, json.loads((folder / "study.json").read_text())


def makespan(results: Results, folder: Path, trials: int, seconds_a_trial: float, *, joins: bool) -> None:
    seconds, found = search(
        folder / f"makespan-{trials}-{joins}",
        trials=trials,
        epochs=EPOCHS,
        prune="none",
        local_nodes=NODES,
        join=joins,
        option={"pause": str(seconds_a_trial / EPOCHS / STEPS)},
    )
    ideal = trials * seconds_a_trial / sum(SPEEDS)
    assert [one["outcome"] for one in found["trials"]] == ["complete"] * trials
    results.add(
        "{trials:3} equal trials, joining {joins!s:5}: {seconds:6.1f} s, {share:.1%} of the ideal; alone {alone:.1f} s",
        trials=trials,
        joins=joins,
        seconds=seconds,
        ideal=ideal,
        share=ideal / seconds,
        alone=trials * seconds_a_trial,
        seconds_a_trial=seconds_a_trial,
        nodes_a_trial=[one["nodes"] for one in found["trials"]],
    )


def overhead(results: Results, folder: Path, trials: int) -> None:
    options = {"pause": "0", "samples": "8"}
    seconds, _ = search(folder / "overhead", trials=trials, epochs=1, local_nodes="1", option=options)
    results.add(
        "overhead: {each:.3f} s a trial, over {trials} trials of one step", each=seconds / trials, trials=trials
    )


def same(results: Results, folder: Path, trials: int) -> None:
    found = [
        search(folder / f"same-{nodes}", trials=trials, epochs=9, local_nodes=nodes, option={"pause": "0.02"})[1]
        for nodes in ("1", NODES)
    ]
    one, three = (
        [(trial["values"], trial["outcome"], len(trial["scores"])) for trial in record["trials"]] for record in found
    )
    scores = [[trial["score"] for trial in record["trials"]] for record in found]
    off = max(abs(a - b) for a, b in zip(*scores, strict=True))
    results.add(
        "one node and three: the same trials {same}, best {best}, scores {off:.1e} apart at most",
        same=one == three,
        best=[record["best"] for record in found],
        off=off,
    )


def draw_images(folder: Path, count: int, size: int) -> Path:
    """Draw images of two classes for a YOLO classifier; return their folder."""
    generator = np.random.default_rng(0)
    for number in range(count):
        for split in ("train", "val"):
            place = folder / "images" / split / ("dark", "light")[number % 2]
            place.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(0, 120 + 120 * (number % 2), (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / f"{number}.png")
    return folder / "images"


def yolo(results: Results, folder: Path, trials: int, seconds_a_trial: float) -> None:
    from evener.frontends.yolo.tuning import yolo_objective

    data = draw_images(folder, STEPS * 8, 32)
    rank = partial(idling_yolo_rank, seconds_a_trial / EPOCHS / STEPS / 8)

    def seconds_of(name: str, trials: int, nodes: str) -> tuple[float, Any]:
        config = TuneConfig(
            task="yolov8n-cls.yaml",
            data=data,
            vary=("lr0=1e-3..1e-1:log",),
            trials=trials,
            epochs=EPOCHS,
            batch_size=8,
            prune="none",
            local_nodes=nodes,
            option={"imgsz": "32", "workers": "0", "plots": "False"},
            output=folder / name,
        )
        begun = time.perf_counter()
        with redirect_stdout(sys.stderr):
            found = search_for(config, partial(yolo_objective, program=rank), as_json=False)
        assert [one.outcome for one in found.trials] == ["complete"] * trials
        return time.perf_counter() - begun, found

    seconds_of("first", 1, "1")  # loads what all processes share
    alone = [seconds_of(f"alone-{speed}", 1, str(speed))[1].trials[0].seconds for speed in SPEEDS]
    seconds, found = seconds_of("search", trials, NODES)
    ideal = trials / sum(1 / one for one in alone)
    results.add(
        "{trials:3} equal trials of a YOLO classifier: {seconds:6.1f} s, {share:.1%} of the ideal",
        trials=trials,
        seconds=seconds,
        ideal=ideal,
        share=ideal / seconds,
        share_by_speed=trials * alone[0] / sum(SPEEDS) / seconds,
        alone=alone,
        nodes_a_trial=[one.nodes for one in found.trials],
    )


@contextmanager
def master_with(folder: Path, speeds: Sequence[float], site: Path) -> Iterator[Path]:
    """Yield the folder of a master with a node of each speed, whose processes run the `sitecustomize` of `site`."""
    home, path = folder / "home", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    evener = (sys.executable, "-m", "evener")
    with ExitStack() as stack:

        def start(*words: str, **pipes: Any) -> subprocess.Popen[bytes]:
            begun = stack.enter_context(subprocess.Popen([*evener, *words], env=variables, **pipes))
            stack.callback(begun.terminate)
            return begun

        address = ("--home", str(home), "--listen", "127.0.0.1:0", "--json")
        master = start("up", *address, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert master.stdout is not None
        said = json.loads(master.stdout.readline())
        for speed in speeds:
            own = ("--name", f"node-{speed}", "--speed", str(speed), "--cache", str(folder / f"cache-{speed}"))
            words = ("join", said["address"], "--token", said["token"], "--device", "cpu", *own)
            start(*words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with MasterClient(*find_master(StateDir(home), None, None)) as client:
            while sum(bool(node.score) for node in client.ask().nodes) < len(speeds):
                time.sleep(0.2)
        yield home


IDLING_SITE = """
import importlib.abc, importlib.machinery, runpy, sys
from pathlib import Path

here = Path(__file__).parent
for place in sys.path:  # the one that this one hides
    other = Path(place, "sitecustomize.py")
    if Path(place) != here and other.exists():
        runpy.run_path(str(other))
        break


class Idling(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "evener.frontends.yolo.trainer":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            sys.path.append({benchmarks!r})
            from tune_task import Sleeper

            compute, sleep = module.DistributedModel._outputs, Sleeper()

            def idle(model, batch, is_counted):
                images = len(model._trainer.train_loader.part.indices)
                sleep(images * {seconds!r} / model._trainer.trainer_rank.env.node.speed_at(0))
                return compute(model, batch, is_counted)

            module.DistributedModel._outputs = idle

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Idling())
"""


def yolo_on_master(results: Results, folder: Path, trials: int, seconds_a_trial: float) -> None:
    from evener.frontends.yolo.tuning import yolo_objective

    data, site = draw_images(folder, STEPS * 8, 32), folder / "site"
    site.mkdir()
    seconds_an_image = seconds_a_trial / EPOCHS / STEPS / 8
    text = IDLING_SITE.format(benchmarks=str(Path(__file__).parent), seconds=seconds_an_image)
    (site / "sitecustomize.py").write_text(text)

    def seconds_of(name: str, trials: int, speeds: Sequence[float]) -> tuple[float, Any]:
        (folder / name).mkdir()
        with master_with(folder / name, speeds, site) as home:
            config = TuneConfig(
                task="yolov8n-cls.yaml",
                data=data,
                vary=("lr0=1e-3..1e-1:log",),
                trials=trials,
                epochs=EPOCHS,
                batch_size=8,
                prune="none",
                home=home,
                option={"imgsz": "32", "workers": "0", "plots": "False"},
                output=folder / name / "study",
            )
            begun = time.perf_counter()
            with redirect_stdout(sys.stderr):
                found = search_for(config, yolo_objective, as_json=False)
        assert [one.outcome for one in found.trials] == ["complete"] * trials
        return time.perf_counter() - begun, found

    alone = []
    for speed in SPEEDS:
        found = seconds_of(f"alone-{speed}", 2, (speed,))[1]
        alone.append(found.trials[1].seconds)  # the first one loads what all share
    seconds, found = seconds_of("search", trials, SPEEDS)
    ideal = trials / sum(1 / one for one in alone)
    results.add(
        "{trials:3} equal trials of a YOLO classifier on a master: {seconds:6.1f} s, {share:.1%} of the ideal",
        trials=trials,
        seconds=seconds,
        ideal=ideal,
        share=ideal / seconds,
        alone=alone,
        nodes_a_trial=[one.nodes for one in found.trials],
    )


def idling_yolo_rank(seconds_an_image: float, env: RankEnvironment, config: Any) -> None:
    """A rank of a trial whose images also take so many seconds of idling, by the speed of its node."""
    from evener.frontends.yolo import trainer, tuning

    compute, sleep = trainer.DistributedModel._outputs, Sleeper()

    def idle(model: Any, batch: Any, is_counted: bool) -> Any:
        images = len(model._trainer.train_loader.part.indices)
        sleep(images * seconds_an_image / env.node.speed_at(0))
        return compute(model, batch, is_counted)

    trainer.DistributedModel._outputs = idle  # type: ignore[assignment,method-assign]
    tuning.trial_rank(env, config)


def thin(results: Results, folder: Path, data: Path) -> None:
    words: tuple[str, ...] = (
        "tune",
        "nfnn",
        "--thin",
        "--data",
        str(data),
        "--vary",
        "lr=1e-3..1:log",
        "--vary",
        "hidden=16,32,64",
    )
    words += ("--trials", "4", "--epochs", "3", "--local-nodes", "1", "--output", str(folder / "thin"), "--json")
    begun = time.perf_counter()
    result = subprocess.run(
        ["taskset", "-c", "0", sys.executable, "-m", "evener", *words],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (GB, GB)),
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(result.stdout.splitlines()[-1]) if result.returncode == 0 else {"error": result.stderr[-500:]}
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    results.add(
        "nfnn without PyTorch, 1 core and 1 GB of address space a process: {found}; {peak_mb:.0f} MB at most",
        found=found,
        peak_mb=peak / 1e6,
        seconds=time.perf_counter() - begun,
    )


def load_pytorch() -> None:
    """In the server from which all trials' processes are forked."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*RANK_MODULES])
    first = context.Process(target=time.sleep, args=(0,))
    first.start()
    first.join()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", default="makespan,joining,overhead,same")
    parser.add_argument("--trials", default="50,12")
    parser.add_argument("--seconds", type=float, default=16.0, help="of a trial on the fastest node")
    parser.add_argument("--data", type=Path, default=Path("data/mnist"))
    words = parser.parse_args()
    parts = words.parts.split(",")
    with open_results(words) as results, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "thin" in parts:
            thin(results, folder, words.data)
        if not set(parts) <= {"yolo", "yolo-master"}:
            load_pytorch()
        for trials in map(int, words.trials.split(",")):
            for joins in (False, True):
                if ("joining" if joins else "makespan") in parts:
                    makespan(results, folder, trials, words.seconds, joins=joins)
        if "yolo" in parts:
            yolo(results, folder, int(words.trials.split(",")[0]), words.seconds)
        if "yolo-master" in parts:
            yolo_on_master(results, folder, int(words.trials.split(",")[0]), words.seconds)
        if "overhead" in parts:
            overhead(results, folder, 20)
        if "same" in parts:
            same(results, folder, 14)


if __name__ == "__main__":
    main()
