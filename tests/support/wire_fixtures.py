"""The transports, as a parameter of tests."""

from __future__ import annotations

import pytest


@pytest.fixture(
    params=["tcp", "tcp+tls", *(pytest.param(name, marks=pytest.mark.posix) for name in ("unix", "unix+tls"))]
)
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name
