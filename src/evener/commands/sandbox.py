"""`evener join --sandbox`: the node in a bubblewrap sandbox, where a task sees only the node's files.

    outside                                        inside, the same command without --sandbox
    -------                                        ------------------------------------------
    finds the token, checks bubblewrap
    starts bwrap                     ------------> system, Python and data (read-only),
    passes Ctrl-C and SIGTERM on     ------------> a separate cache, an empty /tmp and home, no other process
    ends with its exit code          <------------ the network as outside: a node must reach its master

docs/security.md lists the limits of this protection.
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
"""In the node's cache: files that a task may have written are never read outside of a sandbox."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/sys")
_SETTINGS = (
    "alternatives", "ca-certificates", "group", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime",
    "nsswitch.conf", "passwd", "resolv.conf", "ssl",
)  # fmt: skip
_DEVICES = ("/dev/nvidia*", "/dev/dri", "/dev/kfd")
_VARIABLES = ("PATH", "PYTHONPATH", "LANG", "LC_", "TZ", "TERM", "OMP_", "MKL_", "CUDA_", "NVIDIA_", "LD_LIBRARY_PATH")
"""Prefixes of variables that a node needs; all others, which may hold secrets, stay outside."""


def join_confined(config: JoinConfig, token: str, variable: str, cache: Path, environment: Mapping[str, str]) -> int:
    """Be a node inside a sandbox; return the exit code of its command.

    Args:
        config: of the node.
        token: of the master.
        variable: environment variable for the token inside.
        cache: of the node.
        environment: variables here.

    Raises:
        InvalidInput: bubblewrap is missing, or may not create a sandbox here.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise InvalidInput("--sandbox needs bubblewrap, on Linux: apt install bubblewrap")
    folder = cache.absolute() / FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    box = [bwrap, *_sandbox_options(folder, config.data)]
    trial = subprocess.run([*box, "--", "/bin/true"], capture_output=True, text=True, check=False)
    if trial.returncode:
        reason, _, _ = trial.stderr.partition("\n")
        raise InvalidInput(f"--sandbox: bubblewrap cannot create a sandbox here: {reason}")
    variables = {name: value for name, value in environment.items() if name.startswith(_VARIABLES)}
    command = [sys.executable, "-P", "-m", "evener", *_arguments(config, folder)]
    return _perform(box, command, variables | {"HOME": "/tmp", variable: token})


def _perform(box: list[str], command: list[str], environment: dict[str, str]) -> int:
    """Run `command` in the sandbox; pass on signals that end this process, and wait for its end."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [*box, "--info-fd", str(writing), "--", *command], env=environment, pass_fds=[writing], start_new_session=True
    )
    os.close(writing)
    with os.fdopen(reading) as info:
        inside = int(json.loads(info.read() or '{"child-pid": 0}')["child-pid"])
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # of any stop signal (`interrupt_on_stop_signals`)
            if process.poll() is None and inside:
                ignores_ctrl_c = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
                os.kill(inside, signal.SIGTERM if ignores_ctrl_c else signal.SIGINT)


def _sandbox_options(cache: Path, data: Path | None) -> list[str]:
    """Return the options of bubblewrap: read-only files, one writable folder, no other processes."""
    args = ["--unshare-user-try", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    args += ["--die-with-parent", "--new-session", "--as-pid-1", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for path in _readable(data):
        args += ["--ro-bind-try", path, path]
    for path in (path for pattern in _DEVICES for path in glob(pattern)):
        args += ["--dev-bind-try", path, path]
    return [*args, "--bind", str(cache), str(cache), "--chdir", "/tmp"]


def _readable(data: Path | None) -> Iterator[str]:
    """Yield the readable paths: system, Python with its packages, and the data."""
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


def _arguments(config: JoinConfig, cache: Path) -> list[str]:
    """Return the arguments of the command inside."""
    arguments = ["join", str(config.address), "--cache", str(cache), "--speed", str(config.speed)]
    arguments += ["--grace", str(config.grace)]
    named = {"--name": config.name, "--device": config.device, "--submitters": config.submitters}
    for option, value in (named | {"--data": config.data and config.data.resolve()}).items():
        arguments += [] if value is None else [option, str(value)]
    switches = {"--insecure": config.insecure, "--thin": config.thin, "--built-in-only": config.built_in_only}
    switches["--no-listen"] = not config.listen
    return arguments + [option for option, is_on in switches.items() if is_on]
