"""What `evener join` and the others make of words: tokens from three places, profiles that are remembered."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.commands.doctor import doctor
from evener.commands.join import (
    KNOWN_SECONDS,
    check_security,
    choose_device,
    given_token,
    join,
    known_profile,
    own_key,
    own_name,
)
from evener.commands.up import down, invitation, invite, nodes, open_master, stop
from evener.config.options import DoctorConfig, InviteConfig, JoinConfig, MasterAccess, NodesAccess, StopAccess
from evener.config.run_config import RunConfig
from evener.ps.protocol.config import Beacon, StateDir, Versions, reachable_address
from evener.records.errors import InvalidInput, MissingFile
from evener.records.profile import DeviceProfile
from evener.training.console import run_folder
from evener.wire.errors import CannotJoin
from evener.wire.identity import ROLES, Address, Token
from support.refusals import refused

TOKEN = Token(secret=bytes(16), fingerprint=None)


def profile(cores: int = 1) -> DeviceProfile:
    return DeviceProfile(node="n", device="cpu", model="", cores=cores, memory_bytes=1, usable_memory_bytes=1)


def test_token_is_read_from_option_file_or_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    environment = {"EVENER_TOKEN": "from-environment"}
    assert given_token("typed", None, environment) == "typed"
    assert (given_token(None, file, environment) or "").strip() == "from-file"
    assert given_token(None, None, environment) == "from-environment"
    assert given_token(None, None, {}) is None


def test_unreadable_token_raises_a_sentence(tmp_path: Path) -> None:
    with refused(InvalidInput):
        JoinConfig(address="127.0.0.1:1", token="typed", token_file=tmp_path)
    with refused(MissingFile):
        given_token(None, tmp_path / "none", {})


CONNECTS: dict[str, tuple[type[Any], Callable[[Any], object], dict[str, Any]]] = {
    "nodes": (NodesAccess, lambda access: nodes(access, as_json=False), {}),
    "stop": (StopAccess, stop, {}),
    "down": (MasterAccess, down, {}),
    "invite": (InviteConfig, invite, {}),
    "doctor": (DoctorConfig, lambda config: doctor(config, as_json=False), {}),
    "train": (RunConfig, open_master, {"task": "digits", "agreement": "sync"}),
}


@pytest.mark.parametrize("name", CONNECTS)
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o600])
def test_every_command_warns_of_a_readable_token_file(
    name: str, mode: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, run, words = CONNECTS[name]
    file = tmp_path / "token"
    file.write_text(TOKEN.text)
    file.chmod(mode)
    with pytest.raises(CannotJoin):
        run(kind(master=f"unix:{tmp_path / 'none'}", token_file=file, **words))
    assert (f"chmod 600 {file}" in capsys.readouterr().err) == (mode != 0o600)


def test_join_warns_of_a_readable_token_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN.text)
    file.chmod(0o644)
    config = JoinConfig(address=f"unix:{tmp_path / 'none'}", token_file=file, insecure=True, cache=tmp_path, thin=True)
    with pytest.raises(CannotJoin):
        join(config, environment={})
    assert f"chmod 600 {file}" in capsys.readouterr().err


def test_commands_warn_of_readable_key_and_beacon_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own_key(tmp_path)
    home = StateDir(tmp_path)
    home.announce(Beacon(address="unix:/none", listen="unix:/none", token=TOKEN.text, pid=0, patience=1.0))
    assert capsys.readouterr().err == ""
    for file in (tmp_path / "key", home.beacon_file):
        file.chmod(0o644)
    own_key(tmp_path)
    with pytest.raises(CannotJoin):
        open_master(MasterAccess(home=tmp_path))
    said = capsys.readouterr().err
    assert all(f"chmod 600 {file}" in said for file in (tmp_path / "key", home.beacon_file))


def test_join_without_a_token_names_the_three_sources(tmp_path: Path) -> None:
    with refused(InvalidInput):
        join(JoinConfig(address="127.0.0.1:1", device="cpu", cache=tmp_path, thin=True), environment={})


def test_insecure_option_and_token_must_agree() -> None:
    open_token, closed = Token(secret=bytes(16), fingerprint=None), Token(secret=bytes(16), fingerprint=bytes(32))
    check_security(open_token, insecure=True)
    check_security(closed, insecure=False)
    with refused(InvalidInput):
        check_security(open_token, insecure=False)
    with refused(InvalidInput):
        check_security(closed, insecure=True)


def test_profile_is_measured_once_a_day(tmp_path: Path) -> None:
    measured: list[DeviceProfile] = []

    def measure(*_: Any) -> DeviceProfile:
        measured.append(profile(cores=len(measured) + 1))
        return measured[-1]

    def cores(clock: float) -> int:
        found = known_profile("n", "cpu", 1.0, thin=True, cache=tmp_path, measure=measure, clock=lambda: clock)
        return found.cores

    assert cores(0.0) == 1
    [file] = (tmp_path / "profiles").iterdir()
    written = file.stat().st_mtime
    assert cores(written + KNOWN_SECONDS - 1) == 1
    assert cores(written - 1) == 2  # a clock that was set back
    assert cores(written + 2 * KNOWN_SECONDS) == 3
    file.write_text("{}")
    assert cores(file.stat().st_mtime) == 4
    assert len(measured) == 4


def test_each_device_speed_and_version_has_its_profile_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def remember(name: str = "n", device: str = "cpu", speed: float = 1.0, *, thin: bool = True) -> int:
        known_profile(name, device, speed, thin=thin, cache=tmp_path, measure=lambda *_: profile())
        return len(list((tmp_path / "profiles").iterdir()))

    assert [remember(), remember(), remember("m"), remember(device="cuda:0"), remember(speed=0.5)] == [1, 1, 2, 3, 4]
    assert remember(thin=False) == 5
    monkeypatch.setattr("evener.commands.join.versions_here", lambda: Versions("0", "0", "0.0"))
    assert remember() == 6


def test_user_defined_name_is_used_unchanged(tmp_path: Path) -> None:
    with own_name("ada", "host", tmp_path) as one, own_name("ada", "host", tmp_path) as other:
        assert (one, other) == ("ada", "ada")
    assert not list(tmp_path.iterdir())


def test_nodes_of_one_machine_get_distinct_stable_names(tmp_path: Path) -> None:
    with own_name(None, "host", tmp_path) as one, own_name(None, "host", tmp_path) as other:
        assert (one, other) == ("host", "host-2")
        with own_name(None, "host-cuda0", tmp_path) as third:
            assert third == "host-cuda0"
    with own_name(None, "host", tmp_path) as again:
        assert again == "host"


def test_name_locked_by_another_user_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def guarded(self: Path, *words: Any, **named: Any) -> Any:
        if self.name == "evener-node-host.lock":
            raise PermissionError(13, "Permission denied")
        return opened(self, *words, **named)

    monkeypatch.setattr(Path, "open", guarded)
    with own_name(None, "host", tmp_path) as one:
        assert one == "host-2"


def test_error_inside_frees_the_name_and_propagates(tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match="of the node's own"), own_name(None, "host", tmp_path):
        raise PermissionError("of the node's own")
    with own_name(None, "host", tmp_path) as one:
        assert one == "host"


def test_printed_address_is_reachable_from_elsewhere() -> None:
    assert not reachable_address(Address("", 7117)).is_everywhere
    assert reachable_address(Address("10.0.0.5", 7)) == Address("10.0.0.5", 7)


def test_printed_join_command_does_not_contain_the_token(tmp_path: Path) -> None:
    home = StateDir(tmp_path)
    identity = home.identity(insecure=True)
    text = invitation(Address("10.0.0.5", 7), home)
    (typed,) = [line for line in text.splitlines() if "evener join" in line]
    assert typed.strip() == "evener join 10.0.0.5:7"
    assert identity.token_of("node").text in text
    assert identity.token.text not in text
    assert {path.name: path.stat().st_mode & 0o777 for path in home.tokens.iterdir()} == dict.fromkeys(ROLES, 0o600)


def test_missing_device_is_named() -> None:
    assert choose_device("cpu") == "cpu"
    with refused(InvalidInput):
        choose_device("cuda:99")


def test_folder_that_cannot_be_created_raises_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run_folder(tmp_path / "a" / "b").is_dir()
    with refused(InvalidInput):
        run_folder(tmp_path / "file" / "run")


_THIN_NODE = """
import sys
import numpy as np, psutil
import evener.commands.join
from evener.autodiff import functional as F, nn, optim
from evener.ps.node.engine import EngineSetup, TaskEngine
from evener.ps.protocol.job import Job
from evener.ps.node.thin_backend import ThinBackend
from evener.agreements.settings import Sgd, Workload, synchronous
from evener.records.task import ThinTask

task = ThinTask(model=lambda: nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)), loss=F.cross_entropy,
    train_data=lambda: (np.ones((64, 784), np.float32), np.ones(64, np.int64)),
    optimizer=lambda parameters: optim.SGD(parameters, lr=0.1))
backend = ThinBackend(task, 0, "fp32")
job = Job(run="one", task="one", title="one", agreement_name="sync", layout=backend.layout,
    agreement=synchronous(batch=32, outer=Sgd(learning_rate=0.1)), workload=Workload(num_samples=64, num_epochs=1))
assert TaskEngine(backend, EngineSetup(job, None, None, "cpu", 1.0, lambda: None)).step_seconds()(1) > 0
loaded = {"torch", "rich", "evener.ps.master.master", "evener.ps.master.lease_training"} & set(sys.modules)
assert not loaded, loaded
assert psutil.Process().memory_info().rss < 55e6, psutil.Process().memory_info().rss
"""


def test_thin_node_needs_55_mb_and_no_pytorch() -> None:
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", _THIN_NODE], check=True, timeout=60, env={**os.environ, **one_thread})
