"""What Evener does on this machine's GPUs, beside what PyTorch alone does there, in the same minutes.

    python benchmarks/gpu.py [--only rates,overhead,memory,merging,scaling] [--json]        some eight minutes
    python benchmarks/gpu.py --device cpu --small                             the same in small, to try it without a GPU

rates       FLOP/s and bandwidth as `evener benchmark` finds them, twice, against one large product by PyTorch
overhead    a step of `evener train` against a plain loop (pinned memory, copies beside computing), one GPU
memory      the peak of the batch that is promised to fit, against what was allowed
merging     four states on the GPU: in place key by key, flat and weighted, against a copy of as many bytes
scaling     samples a second on 1, 2, 4 ... GPUs, and what the oracle predicted for them
"""

from __future__ import annotations

import itertools
import math
import tempfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_task import KINDS
from gpu_task import task as make_task
from merging import merge_flat_on_device, merge_in_place
from results import Results, open_results, parser_of
from torch.utils.data import DataLoader, RandomSampler
from turns import in_turn, ratios, seconds_of, spread

from evener.benchmark.device import DTYPES, profile_device
from evener.benchmark.dry_run import SHARE_OF_USABLE, capacity, dry_run_of
from evener.comm.group import Group
from evener.commands.train import perform
from evener.config.run_config import RunConfig
from evener.experiments.local_ranks import measure_ranks
from evener.launch.nodes import local_nodes
from evener.launch.rank_environment import RankEnvironment
from evener.oracle.apportion import NodeCost
from evener.oracle.data_parallel import Candidate, GradientSync, plan_data_parallel
from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from evener.training.context import RankContext, make_context
from evener.training.loop import Loop
from evener.training.training import make_training

TASK = str(Path(__file__).with_name("gpu_task.py"))
Step = Callable[[], object]


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_seconds(device: torch.device, work: Step, times: int = 1) -> float:
    """Seconds of doing `work` so many times, until the device has ended; a part of them for each."""

    def all_of_it() -> None:
        for _ in range(times):
            work()
        synchronise(device)

    synchronise(device)
    return seconds_of(all_of_it) / times


def rates(results: Results, words: Namespace) -> None:
    """What `evener benchmark` says of the device, in two runs, against one large product."""
    device = torch.device(words.device)
    seconds = 2.0 if words.small else 10.0
    found = [profile_device("here", device, seconds=seconds) for _ in range(2)]
    side = 512 if words.small else 8192
    for first, second in zip(*(one.throughputs for one in found), strict=True):
        if first.matmul_flops is None or second.matmul_flops is None:
            continue
        a = torch.rand(side, side, device=device).to(DTYPES[first.precision])

        def product(a: torch.Tensor = a) -> None:
            _ = a @ a
            synchronise(device)

        alone = 2 * side**3 / min(in_turn({"product": partial(seconds_of, product)}, 10)["product"])
        results.add(
            "{precision}: {tera:.2f} TFLOP/s, {of_vendor:.0%} of one product by the vendor's library, runs differ by "
            "{differ:.1%}",
            part="rates",
            precision=first.precision,
            tera=first.matmul_flops / 1e12,
            of_vendor=first.matmul_flops / alone,
            differ=abs(first.matmul_flops / second.matmul_flops - 1),
        )
    bandwidths = [one.bandwidth or math.nan for one in found]
    results.add(
        "memory: {tera:.2f} TB/s, runs differ by {differ:.1%}",
        part="rates",
        precision="copy",
        tera=bandwidths[0] / 1e12,
        differ=abs(bandwidths[0] / bandwidths[1] - 1),
    )


def plain_step(context: RankContext, words: dict[str, Any]) -> Step:
    """A step of a loop that somebody who knows PyTorch would write."""
    device, model = context.group.device, context.model
    if words["compile"]:
        model.compile()
    optimizer = context.make_optimizer(model.parameters())
    pinned = device.type == "cuda"
    loader = DataLoader(
        context.train_data,
        context.batch_size,
        sampler=RandomSampler(context.train_data, num_samples=10**7),  # type: ignore[arg-type]  # one endless epoch
        pin_memory=pinned,
        num_workers=words["workers"],
    )
    batches = iter(loader)
    cast = torch.autocast(device.type, torch.bfloat16) if words["precision"] == "bf16" else nullcontext()

    def step() -> None:
        inputs, targets = (one.to(device, non_blocking=True) for one in next(batches))
        with cast:
            loss = context.task.loss(model(inputs), targets)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def evener_step(context: RankContext, config: RunConfig) -> Step:
    """A step of a run of one node."""
    candidate = Candidate(node="node-0", device=config.devices, worker=NodeCost(unit_seconds=1.0))
    plan = plan_data_parallel([candidate], context.batch_size, GradientSync(gradient_bytes=0))
    loop = Loop(make_training(context, plan, config), config)
    loader, numbers = loop.loader(1), itertools.count(1)
    return lambda: loop.one_step(next(numbers), loader)


def block_seconds(words: dict[str, Any], env: RankEnvironment, group: Group) -> dict[str, list[float]]:
    """One rank: seconds of a step of both ways, by blocks; whoever reads waits for the GPU once a block."""
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            task=TASK,
            option={"network": words["network"], "batches": "16"},
            output=Path(folder),
            precision=words["precision"],
            compile=words["compile"],
            devices=words["device"],
            workers=words["workers"],
            epochs=1000,
        )
        contexts = [make_context(env, group, config) for _ in range(2)]
        steps = {"plain": plain_step(contexts[0], words), "evener": evener_step(contexts[1], config)}

        ways = {way: partial(device_seconds, group.device, step, words["steps"]) for way, step in steps.items()}
        return in_turn(ways, words["blocks"], warm_up=2)


def overhead(results: Results, words: Namespace) -> None:
    """A step of Evener's against a plain loop's, network by network."""
    networks = ("small-resnet", "small-gpt") if words.small else ("resnet50", "gpt")
    for network, compiled in itertools.product(networks, (False,) if words.small else (False, True)):
        asked = {**vars(words), "network": network, "compile": compiled, "precision": "bf16"}
        blocks = measure_ranks(local_nodes([words.device]), partial(block_seconds, asked), dict[str, list[float]])
        results.add(
            "{network}{suffix}: {plain_ms:.2f} ms plain, {evener_ms:.2f} ms Evener, ratio {ratio:.3f}",
            part="overhead",
            network=network,
            compiled=compiled,
            suffix=" compiled" if compiled else "",
            plain_ms=median(blocks["plain"]) * 1e3,
            evener_ms=median(blocks["evener"]) * 1e3,
            ratio=ratios(blocks["evener"], blocks["plain"]),
        )


def memory(results: Results, words: Namespace) -> None:
    """The peak of a step of the promised batch against what was allowed: 90 % of the usable memory."""
    device, allowed = torch.device(words.device), 4 << 30
    if device.type != "cuda":
        results.say("memory: PyTorch counts that of a GPU alone")
        return
    for network, precision in itertools.product(("resnet50", "gpt"), (torch.float32, torch.bfloat16, torch.float16)):
        samples, peak = peak_of_promised(network, precision, device, allowed)
        results.add(
            "{network} {precision}: {samples} samples, peak {of_allowed:.1%} of what was allowed",
            part="memory",
            network=network,
            precision=str(precision),
            samples=samples,
            of_allowed=peak / (SHARE_OF_USABLE * allowed),
        )


def peak_of_promised(network: str, precision: torch.dtype, device: torch.device, allowed: int) -> tuple[int, int]:
    """Samples that are promised to fit `allowed` bytes of a GPU, and the peak of a step on them, in bytes."""
    task = make_task(network, 1)
    inputs, targets = next(iter(DataLoader(task.train_data(), 1)))

    def loss_step(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cuda", precision, enabled=precision != torch.float32):
            return KINDS[network].loss(model(batch[0]), batch[1])

    def fetch(samples: int) -> list[torch.Tensor]:
        return [one.to(device).repeat(samples, *[1] * (one.dim() - 1)) for one in (inputs, targets)]

    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    with dry_run_of(task.model().to(device), optimizer, loss_step, fetch, device) as trial:
        samples = capacity(trial, 1 << 20, allowed)
        assert samples is not None
        torch.cuda.reset_peak_memory_stats(device)
        trial.run_step(samples)
        return samples, torch.cuda.max_memory_allocated(device)


def merging(results: Results, words: Namespace) -> None:
    """Four states merged on the device, as a fraction of the speed of a copy."""
    device = torch.device(words.device)
    for nbytes in (10**6,) if words.small else (10**8, 10**9):
        flat = [torch.rand(nbytes // 4, device=device) for _ in range(4)]
        keys = [{str(i): part for i, part in enumerate(one.chunk(160))} for one in flat]
        out, weights = torch.empty_like(flat[0]), [1.0, 2.0, 3.0, 4.0]

        ways: dict[str, Step] = {
            "copy": partial(out.copy_, flat[0]),
            "in place": partial(merge_in_place, keys),
            "flat": partial(merge_flat_on_device, out, flat, weights),
        }
        times = in_turn({name: partial(device_seconds, device, way) for name, way in ways.items()}, 9)
        for name in ("in place", "flat"):
            moved = {"in place": 3 * 3 + 2, "flat": 2 + 3 * 3 + 2}[
                name
            ]  # reads and writes of a state, as they are made
            speeds = [moved / took for took in times[name]]
            results.add(
                "4 x {megabytes:.0f} MB {way}: {ms:.2f} ms, {of_copy.median:.0%} of the bandwidth of a copy",
                part="merging",
                megabytes=nbytes / 1e6,
                way=name,
                ms=median(times[name]) * 1e3,
                of_copy=ratios(speeds, [2 / took for took in times["copy"]]),
            )


def scaling(results: Results, words: Namespace) -> None:
    """Samples a second on more and more GPUs, strategy by strategy, and the oracle's word for them."""
    count = 2 if words.device == "cpu" else torch.cuda.device_count()
    network = "small-resnet" if words.small else "resnet50"
    alone = math.nan
    for gpus in (2**i for i in range(int(math.log2(max(1, count))) + 1)):
        for strategy in ("data", "pipeline", "sharded") if gpus > 1 else ("data",):
            with tempfile.TemporaryDirectory() as folder:
                names = ["cpu"] * gpus if words.device == "cpu" else [f"cuda:{i}" for i in range(gpus)]
                asked = {"network": network, "batches": "16" if words.small else "64"}
                shares = ",".join("1" * gpus) if gpus > 1 and strategy != "pipeline" else "measured"
                perform(
                    RunConfig(
                        task=TASK,
                        option=asked,
                        output=Path(folder, "run"),
                        precision="bf16",
                        devices=",".join(names),
                        strategy=strategy,
                        shares=shares,
                        check=False,
                        quiet=True,
                    )
                )
                record = read_noun(Path(folder, "run", "record.json"), TrainRecord)
            predicted = record.plan.prediction
            seconds = spread([step.seconds for step in record.steps[2:]]).median
            alone = seconds if gpus == 1 else alone
            results.add(
                "{strategy} on {gpus}: {ms:.1f} ms a step, {speedup:.2f} times one GPU, predicted {predicted:.1f} ms",
                part="scaling",
                strategy=strategy,
                gpus=gpus,
                ms=seconds * 1e3,
                speedup=alone / seconds,
                predicted=predicted.step_seconds * 1e3 if predicted else math.nan,
            )


PARTS = {"rates": rates, "overhead": overhead, "memory": memory, "merging": merging, "scaling": scaling}


def main() -> None:
    """All parts, or some."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--workers", type=int, default=4, help="processes that load, of each way")
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    words = parser.parse_args()
    if words.device != "cpu" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu --small tries the benchmark without one")
    with open_results(words) as results:
        for name in words.only.split(","):
            results.say(f"--- {name}")
            PARTS[name](results, words)


if __name__ == "__main__":
    import_module("gpu").main()  # ranks import what is defined here
