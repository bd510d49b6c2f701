"""Sums of gradients over ranks whose lines differ, against Gloo's all-reduce by turns in the same run.

    python benchmarks/uneven_sums.py [--mbit 1000,1000,1000,100] [--megabytes 100] [--rounds 3] [--json]

Each rank is in a network namespace of its own (needs root and iproute2), whose line carries so many megabits a second
each way. The ranks measure their lines and choose, as a run does before its plan; then both ways take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
from results import open_results, parser_of

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from evener.benchmark.exchanges import measure_sums
from evener.comm.group import Group
from evener.comm.joining import join_group, leave_group
from evener.comm.signed_store import SignedStore
from hosts import Host, why_not
from hosts.machines import Hosts

SECONDS = 900.0
PORT = 29557


def main() -> None:
    """Build the hosts, run a rank on each, and print what the first one found."""
    parser = parser_of(__doc__)
    parser.add_argument("--mbit", default="1000,1000,1000,100", help="of each rank's line, each way")
    parser.add_argument("--megabytes", type=float, default=100.0, help="of float32 to be summed")
    parser.add_argument("--rounds", type=int, default=3, help="sums in each way")
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.rank:
        rank, first, address = words.rank.split(",")
        be_rank(int(rank), first, address, words)
        return
    if reason := why_not():
        sys.exit(reason)
    rates = [float(rate) for rate in words.mbit.split(",")]
    with (
        open_results(words) as results,
        tempfile.TemporaryDirectory(prefix="evener-") as folder,
        Hosts.build([Host(name=f"h{rank}", mbit=rate) for rank, rate in enumerate(rates)], Path(folder)) as hosts,
    ):
        options = ["--mbit", words.mbit, "--megabytes", str(words.megabytes), "--rounds", str(words.rounds)]
        store = hosts["h0"].address
        environment = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        ranks = [
            hosts[name].start(
                [sys.executable, __file__, *options, "--rank", f"{number},{store},{hosts[name].address}"],
                environment=environment,
            )
            for number, name in enumerate(hosts)
        ]
        for one in ranks:
            assert one.wait(SECONDS) == 0, one.text
        found = json.loads(ranks[0].text.splitlines()[-1])
        pairs = [own / gloo for gloo, own in zip(found["gloo"], found["own"], strict=True)]
        results.add(
            "{lines}: {gloo:6.2f} s by Gloo's all-reduce, {own:6.2f} s here ({way}): ratio {ratio:.3f} "
            "(pairs {lowest:.3f} to {highest:.3f})",
            lines=words.mbit,
            gloo=statistics.median(found["gloo"]),
            own=statistics.median(found["own"]),
            way="owners" if found["shares"] else "a ring",
            shares=found["shares"],
            ratio=statistics.median(pairs),
            lowest=min(pairs),
            highest=max(pairs),
        )


def be_rank(rank: int, first: str, address: str, words: argparse.Namespace) -> None:
    """Measure, choose, and sum by turns; the first rank prints its seconds."""
    size = words.mbit.count(",") + 1
    is_first, stores = rank == 0, cast(Any, dist)
    inner = stores.TCPStore(first, PORT, size, is_first, timedelta(seconds=60))
    group = join_group(
        rank=rank,
        nodes=[f"h{number}" for number in range(size)],
        device=torch.device("cpu"),
        store=SignedStore(inner, b"0123456789abcdef"),
        patience=60.0,
        address=address,
    )
    numbers = int(words.megabytes * 1e6 / 4)
    measure_sums(group, 4 * numbers, group.nodes)
    shares = list(group.sum_shares)
    seconds: dict[str, list[float]] = {"gloo": [], "own": []}
    for turn in range(words.rounds + 1):
        sums = {way: seconds_of(group, way, numbers) for way in seconds}
        for way, (took, _) in sums.items():
            seconds[way] += [took] if turn else []  # the first turn opens buffers
        torch.testing.assert_close(sums["own"][1], sums["gloo"][1])
        bits = sums["own"][1].numpy().tobytes()
        assert len(set(group.all_gather_bytes(str(crc32(bits)).encode()))) == 1 or not shares
    if is_first:
        print(json.dumps({"shares": shares, **seconds}))
    group.barrier()
    leave_group()


def seconds_of(group: Group, way: str, numbers: int) -> tuple[float, torch.Tensor]:
    """Sum numbers of this rank; return the seconds and the sums."""
    tensor = torch.randn(numbers, generator=torch.Generator().manual_seed(group.rank))
    group.barrier()
    started = time.perf_counter()
    if way == "gloo":
        dist.all_reduce(tensor, group=group.process_group)
    else:
        group.all_reduce(tensor, "gradients")
    group.barrier()
    return time.perf_counter() - started, tensor


if __name__ == "__main__":
    main()
