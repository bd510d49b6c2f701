"""A node in a box: a task there sees the system, Python, the data and its own cache, and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evener.commands import sandbox
from evener.commands.sandbox import _arguments, _perform, _sandbox_options, join_confined
from evener.config.options import JoinConfig
from evener.records.errors import InvalidInput
from support.refusals import refused

LOOK = """
import json, os, sys
from pathlib import Path
def attempt(action):
    try: return str(action())
    except OSError as error: return type(error).__name__
secret, cache, data = map(Path, sys.argv[1:])
print(json.dumps({
    "secret": attempt(secret.read_text), "shadow": attempt(Path("/etc/shadow").read_text),
    "data": attempt((data / "x").read_text), "change data": attempt(lambda: (data / "y").write_text("1")),
    "system": attempt(lambda: Path("/usr/evil").write_text("1")),
    "cache": attempt(lambda: (cache / "kept").write_text("1")),
    "processes": [name for name in os.listdir("/proc") if name.isdigit()],
}))
"""


def has_boxes() -> bool:
    bwrap = shutil.which("bwrap")
    words = ["--ro-bind", "/", "/", "--unshare-pid", "--", "/bin/true"]
    return bwrap is not None and subprocess.run([bwrap, *words], capture_output=True, check=False).returncode == 0


needs_boxes = pytest.mark.skipif(not has_boxes(), reason="bubblewrap is not here, or may not make boxes")


@needs_boxes
def test_sandbox_restricts_reading_writing_and_processes(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    cache, data = tmp_path / "cache", tmp_path / "data"
    for folder in (cache, data):
        folder.mkdir()
    (data / "x").write_text("a sample")
    words = [sys.executable, "-c", LOOK, str(tmp_path / "secret"), str(cache), str(data)]
    done = subprocess.run(
        ["bwrap", *_sandbox_options(cache, data), "--", *words], capture_output=True, text=True, check=False
    )
    found = json.loads(done.stdout or done.stderr)
    assert found == {
        "secret": "FileNotFoundError",
        "shadow": "FileNotFoundError",
        "data": "a sample",
        "change data": "OSError",
        "system": "OSError",
        "cache": "1",
        "processes": ["1"],
    }
    assert (cache / "kept").read_text() == "1"


@needs_boxes
def test_sandbox_passes_on_the_exit_code(tmp_path: Path) -> None:
    script = "import os, sys; sys.exit(7 if os.environ['A_TOKEN'] == 't' else 1)"
    box = ["bwrap", *_sandbox_options(tmp_path, None)]
    assert _perform(box, [sys.executable, "-c", script], {"A_TOKEN": "t", "HOME": "/tmp"}) == 7


def test_only_listed_variables_enter_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []
    monkeypatch.setattr(shutil, "which", lambda _: "/bin/true")

    def perform(_sandbox_options: list[str], _command: list[str], environment: dict[str, str]) -> int:
        given.append(environment)
        return 0

    monkeypatch.setattr(sandbox, "_perform", perform)
    here = {"PATH": "/usr/bin", "AWS_SECRET_ACCESS_KEY": "x", "OMP_NUM_THREADS": "1", "LC_ALL": "C"}
    assert join_confined(JoinConfig(address="127.0.0.1:1", sandbox=True), "t", "A_TOKEN", tmp_path, here) == 0
    assert sorted(given[0]) == ["A_TOKEN", "HOME", "LC_ALL", "OMP_NUM_THREADS", "PATH"]


def test_missing_bubblewrap_is_reported_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused(InvalidInput):
        join_confined(JoinConfig(address="a:1"), "t", "T", tmp_path, {})
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to make one' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with refused(InvalidInput):
        join_confined(JoinConfig(address="a:1"), "t", "T", tmp_path, {})


def test_sandboxed_command_omits_token_and_sandbox_option(tmp_path: Path) -> None:
    config = JoinConfig(
        address="a:1", token="secret", name="n", data=tmp_path, sandbox=True, thin=True, submitters="alice,bob"
    )
    assert _arguments(config, Path("/c")) == [
        "join", "a:1", "--cache", "/c", "--speed", "1.0", "--grace", "20.0", "--name", "n", "--submitters", "alice,bob",
        "--data", str(tmp_path), "--thin",
    ]  # fmt: skip
