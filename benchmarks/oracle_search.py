"""How long the search for the best plan takes, for ResNet-152 on 64 and on 1024 devices that all differ.

python benchmarks/oracle_search.py [--devices 64 1024] [--json]
"""

from __future__ import annotations

import random
import time

import msgspec
from results import open_results, parser_of

from evener.oracle.cost.model import CostModel, TrainingJob
from evener.oracle.hypothetical_cluster import hypothetical_profile
from evener.oracle.search import search
from evener.oracle.zoo.networks import resnet152
from evener.records.profile import ClusterProfile, Throughput


def uneven(devices: int, seed: int = 0) -> ClusterProfile:
    """GPUs of four a node whose speeds lie anywhere between a fifth and all of a V100's."""
    draw, profile = random.Random(seed), hypothetical_profile(f"{devices // 4}xv100-node", "10gbe")
    slowed = []
    for device in profile.devices:
        speed = draw.uniform(0.2, 1.0)
        throughput = Throughput(precision="fp32", matmul_flops=speed * 13.3e12, conv_flops=speed * 13.3e12)
        bandwidth = speed * (device.bandwidth or 0.0)
        slowed.append(msgspec.structs.replace(device, throughputs=(throughput,), bandwidth=bandwidth, spread=0.0))
    return msgspec.structs.replace(profile, devices=tuple(slowed))


LIMITS = {64: 5.0, 1024: 60.0}
"""Seconds that the search is to take at most, by the number of devices."""
ROW = "{devices:>8} {seconds:>8.1f} {processor_seconds:>10.1f} {of_limit:>13.0%}  {strategy} on {used} devices"


def main() -> None:
    """A row for each number of devices."""
    parser = parser_of(__doc__)
    parser.add_argument("--devices", type=int, nargs="+", choices=LIMITS, default=list(LIMITS))
    words = parser.parse_args()
    with open_results(words) as results:
        results.say(f"{'devices':>8} {'seconds':>8} {'processor':>10} {'of the limit':>13}  best")
        graph = resnet152()
        for devices in words.devices:
            profile = uneven(devices)
            start, start_of_processor = time.perf_counter(), time.process_time()
            ranking = search(CostModel(TrainingJob(graph=graph, batch_size=16 * devices), profile))
            seconds, processor = time.perf_counter() - start, time.process_time() - start_of_processor
            results.add(
                ROW,
                devices=devices,
                seconds=seconds,
                processor_seconds=processor,
                of_limit=seconds / LIMITS[devices],
                strategy=ranking.best.strategy,
                used=len(ranking.best.devices),
            )


if __name__ == "__main__":
    main()
