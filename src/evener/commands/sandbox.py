"""`evener join --sandbox`: the node in a box of bubblewrap, where a task sees no files but the node's own.

    outside                                        inside, the same command without --sandbox
    -------                                        ------------------------------------------
    finds the token, checks that there is a box
    starts bwrap                     ------------> system and Python (to be read), the data (to be read),
    passes Ctrl-C and SIGTERM on     ------------> a cache of its own, an empty /tmp and home, no other process
    ends with its exit code          <------------ the network as outside: a node has to reach its master

What that does not protect is in docs/security.md.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from glob import glob
from pathlib import Path

from evener.config.options import JoinConfig
from evener.records.errors import InvalidInput

FOLDER = "sandbox"
"""In the node's cache: what a task could have written is never read outside of a box."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/sys")
_SETTINGS = (
    "alternatives", "ca-certificates", "group", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime",
    "nsswitch.conf", "passwd", "resolv.conf", "ssl",
)  # fmt: skip
_DEVICES = ("/dev/nvidia*", "/dev/dri", "/dev/kfd")
_KEPT = ("PATH", "PYTHONPATH", "LANG", "LC_", "TZ", "TERM", "OMP_", "MKL_", "CUDA_", "NVIDIA_", "LD_LIBRARY_PATH")
"""Beginnings of the names of variables that a node needs; all others, with what secrets are in them, stay outside."""


def join_confined(config: JoinConfig, token: str, variable: str, cache: Path, environment: Mapping[str, str]) -> int:
    """Be a node inside of a box; the exit code of the command there.

    Args:
        config: of the node.
        token: of the master.
        variable: of the environment, in which the token goes in.
        cache: of the node.
        environment: variables here.

    Raises:
        InvalidInput: there is no bubblewrap, or it may not make a box here.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise InvalidInput("--sandbox needs bubblewrap, on Linux: apt install bubblewrap")
    own = cache.absolute() / FOLDER
    own.mkdir(parents=True, exist_ok=True, mode=0o700)
    box = [bwrap, *_box(own, config.data)]
    trial = subprocess.run([*box, "--", "/bin/true"], capture_output=True, text=True, check=False)
    if trial.returncode:
        reason, _, _ = trial.stderr.partition("\n")
        raise InvalidInput(f"--sandbox: bubblewrap cannot make a box here: {reason}")
    kept = {name: value for name, value in environment.items() if name.startswith(_KEPT)}
    command = [sys.executable, "-P", "-m", "evener", *_words(config, own)]
    return _perform(box, command, kept | {"HOME": "/tmp", variable: token})


def _perform(box: list[str], command: list[str], environment: dict[str, str]) -> int:
    """Run `command` in a box; signals that end this process end it, in its own time."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [*box, "--info-fd", str(writing), "--", *command], env=environment, pass_fds=[writing], start_new_session=True
    )
    os.close(writing)
    with os.fdopen(reading) as told:
        inside = int(json.loads(told.read() or '{"child-pid": 0}')["child-pid"])
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # of any stop signal (`interrupt_on_stop_signals`)
            if process.poll() is None and inside:
                ignores_ctrl_c = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
                os.kill(inside, signal.SIGTERM if ignores_ctrl_c else signal.SIGINT)


def _box(cache: Path, data: Path | None) -> list[str]:
    """What is seen inside: files to be read, one folder to be written, nobody else's processes."""
    words = ["--unshare-user-try", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--die-with-parent", "--new-session", "--as-pid-1", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for path in _readable(data):
        words += ["--ro-bind-try", path, path]
    for path in (found for pattern in _DEVICES for found in glob(pattern)):
        words += ["--dev-bind-try", path, path]
    return [*words, "--bind", str(cache), str(cache), "--chdir", "/tmp"]


def _readable(data: Path | None) -> Iterator[str]:
    """The system, Python with what is installed for it, and the data."""
    yield from _SYSTEM
    yield from (f"/etc/{name}" for name in _SETTINGS)
    here = os.getcwd()
    packages = str(Path(__file__).parents[2])
    places = {sys.prefix, sys.base_prefix, packages, *(p for p in sys.path if p and os.path.abspath(p) != here)}
    for path in sorted(places):
        if os.path.exists(path) and not any(path == top or path.startswith(f"{top}/") for top in _SYSTEM):
            yield os.path.abspath(path)
    if data is not None:
        yield str(data.resolve())


def _words(config: JoinConfig, cache: Path) -> list[str]:
    """The command inside."""
    words = ["join", config.address, "--cache", str(cache), "--speed", str(config.speed)]
    named = {"--name": config.name, "--device": config.device, "--submitters": config.submitters}
    for option, value in (named | {"--data": config.data and config.data.resolve()}).items():
        words += [] if value is None else [option, str(value)]
    switches = {"--insecure": config.insecure, "--thin": config.thin, "--built-in-only": config.built_in_only}
    return words + [option for option, is_on in switches.items() if is_on]
