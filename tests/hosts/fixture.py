"""The pytest fixture of the hosts; a test module takes it in with `build_hosts = fixture.build_hosts`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest

from hosts.machines import Host, Hosts, why_not

Build: TypeAlias = Callable[..., AbstractContextManager[Hosts]]


@pytest.fixture
def build_hosts(tmp_path: Path) -> Build:
    """`with build_hosts(Host(...), Host(...)) as hosts:`; skips the test where hosts cannot be built."""
    if reason := _why_not():
        pytest.skip(reason)

    def build(*hosts: Host) -> AbstractContextManager[Hosts]:
        return Hosts.build(hosts, folder=tmp_path)

    return build


_why_not = cache(why_not)
