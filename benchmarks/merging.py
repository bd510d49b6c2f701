"""Merging the states of several workers: the two published ways against ours, and all against the memory's bandwidth.

    python benchmarks/merging.py [--workers 4] [--rounds 9] [--json]

States have the keys and shapes of a ResNet-50 (25.6 million parameters, 102 MB, 53 BatchNorms with their counters).
The ways take turns; figures are medians over the rounds, of ratios within a round. The bandwidth is that of a triad
(a <- 3 b + c) in the same blocks on the same threads. Of our merging those bytes are counted that any merging has to
move: every source read once, the result written once.

Besides: what a small push costs the server's core, and how fast compression is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from results import Results, open_results, parser_of
from turns import in_turn, ratios, seconds_of

from evener.agreements.compression import Compressor
from evener.agreements.layout import ArraySpec, Flat, StateLayout, flat_of, layout_of
from evener.agreements.messages import Push
from evener.agreements.parameter_server import ParameterServer
from evener.agreements.robust import merge_robustly
from evener.agreements.settings import AgreementSettings, Compression, Robust, Sgd, Workload, asynchronous, synchronous
from evener.agreements.threads import ThreadPool
from evener.agreements.update import Merging
from evener.experiments.models.resnet import resnet152
from evener.ps.master.merges import DeviceMerge

State = dict[str, NDArray[Any]]
PART_BYTES = 1 << 20
"""Of every worker, that arrive between two calls while streaming."""


NUM_THREADS = 6
A = TypeVar("A", bound=Any)
"""NumPy's arrays or PyTorch's tensors: whatever adds up."""
DEVICE_PART = 1 << 23
"""Numbers that are merged by one call on a GPU: enough for a kernel to be worth its start."""


def merge_on_threads(states: Sequence[Mapping[str, A]]) -> dict[str, A]:
    """As published: the keys are dealt to six threads by their index modulo six; the mean, as new arrays or tensors.

    Counters, those with `tracked` in their key, are summed and not divided.
    """
    keys = list(states[0])

    def merged(key: str) -> A:
        total: A = states[0][key] + states[1][key]
        for state in states[2:]:
            total += state[key]
        if "tracked" not in key:
            total /= len(states)
        return total

    def thread(index: int) -> dict[str, A]:
        return {key: merged(key) for key in keys[index::NUM_THREADS]}

    with ThreadPoolExecutor(NUM_THREADS, "merge") as pool:
        parts = list(pool.map(thread, range(NUM_THREADS)))
    found = {key: value for part in parts for key, value in part.items()}
    return {key: found[key] for key in keys}


@torch.no_grad()
def merge_in_place(states: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """As published: key by key on the device, first all are added to the first state, then the sum is divided.

    Counters, those with `tracked` in their key, are summed and not divided.
    """
    first, *others = states
    for key, total in first.items():
        for other in others:
            total.add_(other[key])
        if "tracked" not in key:
            total.div_(len(states))


@torch.no_grad()
def merge_flat_on_device(out: torch.Tensor, sources: Sequence[torch.Tensor], weights: Sequence[float]) -> None:
    """Our weighted mean of flat tensors, with its order of sums, where they are PyTorch's: part by part."""
    for start in range(0, out.numel(), DEVICE_PART):
        part = slice(start, start + DEVICE_PART)
        total = out[part].copy_(sources[0][part])
        for source, weight in zip(sources[1:], weights[1:], strict=True):
            total.add_(source[part], alpha=weight / weights[0])
        total.mul_(weights[0] / sum(weights))


def resnet50() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the state: every number of it as torchvision's, in the same order."""
    with torch.device("meta"):
        model = resnet152(1000, 64, depths=(3, 4, 6, 3))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def random_state(seed: int) -> State:
    """A state of random numbers."""
    draw = np.random.default_rng(seed)
    return {
        name: np.array(seed) if "tracked" in name else draw.standard_normal(shape, dtype=np.float32)
        for name, shape in resnet50().items()
    }


def triad(cores: ThreadPool, a: Flat, b: Flat, c: Flat) -> None:
    """a <- 3 b + c over the large arrays."""
    out, first, second = a.floats[-1], b.floats[-1], c.floats[-1]

    def block(_: int, i: int, j: int) -> None:
        np.multiply(first[i:j], 3.0, out=out[i:j])
        np.add(out[i:j], second[i:j], out=out[i:j])

    cores.each(0, out.size, out.itemsize, block)


def stream(out: Flat, flats: list[Flat], weights: list[float], cores: ThreadPool) -> None:
    """Merge as if every worker's bytes came in parts."""
    merging = Merging(out, flats, weights, cores)
    for arrived in range(PART_BYTES, out.layout.num_bytes, PART_BYTES):
        merging.advance(arrived)
    merging.finish()


def on_cuda(states: list[State], flats: list[Flat]) -> dict[str, Callable[[], object]]:
    """Ways on the GPU, states there already; none without one."""
    if not torch.cuda.is_available():
        return {}
    there = [{name: torch.from_numpy(array).cuda() for name, array in state.items()} for state in states]
    flat = [torch.from_numpy(one.floats[-1]).cuda() for one in flats]
    out = torch.empty_like(flat[0])

    def b() -> None:
        merge_in_place(there)
        torch.cuda.synchronize()

    def c() -> None:
        merge_flat_on_device(out, flat, [1.0, *range(2, len(flat) + 1)])

    return {"(b) key by key in place, GPU": b, "(c) flat and weighted, GPU": c}


OURS = "(c) flat, equal weights"
"""The same mean as (a) and (b)."""


def ways_to_merge(workers: int, cores: ThreadPool) -> tuple[dict[str, Callable[[], object]], int]:
    """All ways, the triad first, and the bytes of a state."""
    states = [random_state(seed) for seed in range(workers)]
    tensors = [{name: torch.from_numpy(array.copy()) for name, array in state.items()} for state in states]
    layout = layout_of(states[0], statistics=[name for name in states[0] if "running" in name])
    flats = [flat_of(layout, state) for state in states]
    out, weights = Flat(layout), [float(k + 1) for k in range(workers)]
    ways: dict[str, Callable[[], object]] = {
        "triad": lambda: triad(cores, out, flats[0], flats[1]),
        "(a) six threads, NumPy": lambda: merge_on_threads(states),
        "(a) six threads, PyTorch": lambda: merge_on_threads(tensors),
        "(b) key by key in place, PyTorch": lambda: merge_in_place(tensors),
        "(c) flat, weights 1:2:3:4": lambda: Merging(out, flats, weights, cores).finish(),
        OURS: lambda: Merging(out, flats, [1.0] * workers, cores).finish(),
        "(c) streaming, weights 1:2:3:4": lambda: stream(out, flats, weights, cores),
    }
    return ways | robust_ways(out, flats, cores) | on_cuda(states, flats), layout.num_bytes


def robust_ways(out: Flat, flats: list[Flat], cores: ThreadPool) -> dict[str, Callable[[], object]]:
    """The rules that are no mean: on the cores, and by PyTorch on the device."""
    ways: dict[str, Callable[[], object]] = {}
    rules: tuple[Robust, ...] = ("trimmed", "median", "krum")
    for rule in rules:
        ways[f"{rule}, cores"] = partial(merge_robustly, rule, out, flats, cores)
        ways[f"{rule}, device"] = partial(DeviceMerge(rule), out, flats, [1.0] * len(flats))
    return ways


def compare(results: Results, workers: int, rounds: int, cores: ThreadPool) -> None:
    """The table of all ways."""
    ways, size = ways_to_merge(workers, cores)
    times = in_turn({name: partial(seconds_of, way) for name, way in ways.items()}, rounds)
    results.say(f"{workers} states of {size / 1e6:.0f} MB")
    results.say(f"{'way':34} {'ms':>7} {'slower than (c)':>16} {'GB/s':>7} {'of the bandwidth':>17}")
    for name, took in times.items():
        moved = size * (3 if name == "triad" else workers + 1)
        results.add(
            "{way:34} {ms:7.1f} {slower.median:15.2f}x {gb_per_second:7.1f} {of_bandwidth.median:16.0%}",
            way=name,
            ms=median(took) * 1e3,
            slower=ratios(took, times[OURS]),
            gb_per_second=median(moved / seconds for seconds in took) / 1e9,
            of_bandwidth=ratios([moved / seconds for seconds in took], [3 * size / t for t in times["triad"]]),
        )


def cost_of_a_push(agreement: AgreementSettings, workers: int = 3, rounds: int = 2000) -> float:
    """Median seconds that the core takes for a push of 25 450 float32 parameters, its share of the update included."""
    layout = StateLayout(entries=(ArraySpec(name="w", shape=(25_450,), dtype="float32", kind="parameter"),))
    server = ParameterServer(agreement, Workload(num_samples=48_000, num_updates=10**9), Flat(layout), quorum=workers)
    data = np.random.default_rng(0).standard_normal(25_450, dtype=np.float32).tobytes()
    leases: dict[str, int] = {}
    for k in range(workers):
        for reply in server.admit(f"w{k}").replies:
            leases[reply.worker] = reply.answer.lease.number if reply.answer.lease else -1
    found = []
    for _ in range(rounds):
        spent = 0.0
        for name in list(leases):
            inbox = server.inbox(name, leases[name])
            assert inbox is not None
            inbox[:] = data
            del inbox
            push = Push(number=leases[name], seconds=0.001, loss=1.0)
            begun = time.perf_counter()
            outcome = server.push(name, push, len(data))
            spent += time.perf_counter() - begun
            for reply in outcome.replies:
                leases[reply.worker] = reply.answer.lease.number if reply.answer.lease else -1
            del outcome
        found.append(spent / workers)
    return median(found)


def compression(results: Results, cores: ThreadPool) -> None:
    """How fast parameters are packed with error feedback, and unpacked."""
    layout = StateLayout(entries=(ArraySpec(name="w", shape=(25_000_000,), dtype="float32", kind="parameter"),))
    change, residual = Flat(layout), Flat(layout)
    change.floats[0][:] = np.random.default_rng(0).standard_normal(25_000_000, dtype=np.float32)
    kinds: tuple[Compression, ...] = ("bf16", "int8")
    for name in kinds:
        packing = Compressor(layout, name, cores)
        image = np.zeros(packing.num_bytes, np.uint8)
        packing.pack(change, residual, image)
        there = median(seconds_of(partial(packing.pack, change, residual, image)) for _ in range(7))
        back = median(seconds_of(partial(packing.unpack, image, change)) for _ in range(7))
        results.add(
            "{compression}: {smaller:.2f} times smaller; pack {pack_gb:.1f} GB/s, unpack {unpack_gb:.1f} GB/s",
            compression=name,
            smaller=layout.num_bytes / packing.num_bytes,
            pack_gb=1e-9 * layout.num_bytes / there,
            unpack_gb=1e-9 * layout.num_bytes / back,
        )


def main() -> None:
    """All tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    words = parser.parse_args()
    sgd = Sgd(learning_rate=0.01)
    agreements = {
        "synchronous": synchronous(batch=96, outer=sgd),
        "asynchronous": asynchronous(batch=32, outer=sgd),
    }
    with open_results(words) as results, ThreadPool() as cores:
        results.say(f"{cores.threads} threads")
        compare(results, words.workers, words.rounds, cores)
        for name, agreement in agreements.items():
            results.add(
                "a push of 25 450 float32, 3 workers, {agreement}: {microseconds:.0f} microseconds",
                agreement=name,
                microseconds=cost_of_a_push(agreement) * 1e6,
            )
        compression(results, cores)


if __name__ == "__main__":
    main()
