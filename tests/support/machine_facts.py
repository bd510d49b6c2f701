"""The facts of a sound machine, for tests that plant faults in it."""

from __future__ import annotations

from evener.doctor.facts import FolderFacts, Interface, LoadFacts, MachineFacts, NetworkFacts


def interface(name: str, *addresses: str, mtu: int = 1500, is_up: bool = True) -> Interface:
    return Interface(name=name, addresses=addresses, mtu=mtu, is_up=is_up)


SOUND = MachineFacts(
    machine="ada",
    evener="0.2.0",
    python="3.12.1",
    torch="2.13.0",
    processor="Fast 9000",
    clock=1.8e9,
    installed=1.79e9,
    total_bytes=16 * 10**9,
    free_bytes=12 * 10**9,
    machine_bytes=16 * 10**9,
    gpus=(),
    visible_gpus=0,
    gpu_problem="",
    torch_gpus=None,
    folders=(FolderFacts(purpose="runs", path="/runs", free_bytes=10**11, has_inodes=True, is_writable=True),),
    network=NetworkFacts(
        interfaces=(
            interface("lo", "127.0.0.1", "::1", mtu=65536),
            interface("eth0", "10.0.0.5"),
            interface("docker0", "172.17.0.1"),
            interface("eth1", is_up=False),
        ),
        host_addresses=("10.0.0.5",),
        route_address="10.0.0.5",
    ),
    load=LoadFacts(cores=8, busy_cores=0.1),
)
