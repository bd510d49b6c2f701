"""Hosts that tests build on one machine, with links, limits and faults; and a man in the middle."""

from hosts.machines import Host, Hosts, Machine, why_not
from hosts.process import Process

__all__ = ["Host", "Hosts", "Machine", "Process", "why_not"]
