"""The install command names the source and the tool by which Evener was installed."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from evener.records import version
from evener.records.version import pip_install

URL = "https://git.example.org/evener"
FROM_GIT = {"url": URL, "vcs_info": {"vcs": "git", "commit_id": "0ec490b8"}}


def installed(monkeypatch: pytest.MonkeyPatch, folder: Path, source: object) -> str:
    """The command for the extra `torch` of an Evener that was installed from `source` into `folder`."""
    text = None if source is None else json.dumps(source)
    monkeypatch.setattr(version, "_CHECKOUT", folder)
    monkeypatch.setattr(metadata, "distribution", lambda _: SimpleNamespace(read_text=lambda _: text))
    monkeypatch.setattr(sys, "prefix", str(folder))
    return pip_install("torch")


@pytest.mark.parametrize(
    ("receipt", "content", "command"),
    [
        ("", "", "pip install 'evener[torch] @"),
        ("uv-receipt.toml", '[tool]\nrequirements = [{ name = "evener" }]', "uv tool install 'evener[torch] @"),
        (
            "uv-receipt.toml",
            '[tool]\nrequirements = [{ name = "evener", extras = ["vision", "report"], git = "x" }]',
            "uv tool install 'evener[report,torch,vision] @",
        ),
        (
            "pipx_metadata.json",
            '{"main_package": {"package_or_url": "evener[lan] @ git+x"}}',
            "pipx install --force 'evener[lan,torch] @",
        ),
    ],
)
def test_evener_of_a_repository_is_installed_again_by_the_same_tool_with_its_extras(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, receipt: str, content: str, command: str
) -> None:
    if receipt:
        (tmp_path / receipt).write_text(content)
    assert installed(monkeypatch, tmp_path, FROM_GIT) == f"{command} git+{URL}@0ec490b8'"


def test_evener_of_an_archive_is_installed_from_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = installed(monkeypatch, tmp_path, {"url": "file:///downloads/evener.whl", "archive_info": {}})
    assert command == "pip install 'evener[torch] @ file:///downloads/evener.whl'"


def test_evener_of_an_unknown_source_is_installed_from_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert installed(monkeypatch, tmp_path, None) == "pip install '.[torch]', in a checkout of Evener"


def test_evener_of_a_checkout_is_installed_from_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    assert installed(monkeypatch, tmp_path, FROM_GIT) == f"pip install -e '{tmp_path}[torch]'"
