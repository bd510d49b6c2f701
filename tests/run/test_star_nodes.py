"""What `evener join` and the others make of words: tokens from three places, profiles that are remembered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evener.errors import InvalidInput, MissingFile
from evener.profile import DeviceProfile
from evener.run.folder import run_folder
from evener.run.ps_join import join
from evener.run.ps_machine import choose_device, reachable_address, versions
from evener.run.ps_nodes import join_line
from evener.run.ps_options import check_security, given_token
from evener.run.ps_profile import KNOWN_SECONDS, measuring, remembered
from evener.wire.identity import Address, Token


def profile(cores: int = 1) -> DeviceProfile:
    return DeviceProfile(node="n", device="cpu", model="", cores=cores, memory_bytes=1, usable_memory_bytes=1)


def test_a_token_is_taken_from_the_option_the_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    environment = {"EVENER_TOKEN": "from-environment"}
    assert given_token("typed", None, environment) == "typed"
    assert (given_token(None, file, environment) or "").strip() == "from-file"
    assert given_token(None, None, environment) == "from-environment"
    assert given_token(None, None, {}) is None


def test_a_token_that_cannot_be_had_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="leave one of them out"):
        given_token("typed", tmp_path, {})
    with pytest.raises(MissingFile, match=r"cannot read --token-file .*/none: No such file"):
        given_token(None, tmp_path / "none", {})


def test_joining_without_any_token_names_the_three_ways(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"give --token T, --token-file FILE or \$EVENER_TOKEN"):
        join(
            address="127.0.0.1:1",
            token=None,
            name=None,
            device="cpu",
            data=None,
            speed=1.0,
            cache=tmp_path,
            insecure=False,
            thin=True,
            environment={},
        )


def test_user_and_token_have_to_agree_about_encryption() -> None:
    open_token, closed = Token(secret=bytes(16), fingerprint=None), Token(secret=bytes(16), fingerprint=bytes(32))
    check_security(open_token, insecure=True)
    check_security(closed, insecure=False)
    with pytest.raises(InvalidInput, match="add --insecure"):
        check_security(open_token, insecure=False)
    with pytest.raises(InvalidInput, match="leave --insecure out"):
        check_security(closed, insecure=True)


def test_a_profile_is_measured_once_a_day(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "profile.json"
    measured: list[DeviceProfile] = []

    def measure() -> DeviceProfile:
        measured.append(profile(cores=len(measured) + 1))
        return measured[-1]

    assert remembered(file, measure, lambda: 0.0).cores == 1
    written = file.stat().st_mtime
    assert remembered(file, measure, lambda: written + KNOWN_SECONDS - 1).cores == 1
    assert remembered(file, measure, lambda: written - 1).cores == 2  # a clock that was set back
    assert remembered(file, measure, lambda: written + 2 * KNOWN_SECONDS).cores == 3
    file.write_text("{}")
    assert remembered(file, measure, lambda: file.stat().st_mtime).cores == 4
    assert len(measured) == 4


def test_profiles_of_different_devices_speeds_and_versions_lie_in_different_files(tmp_path: Path) -> None:
    here = versions()
    variants = [("n", "cpu", 1.0, True), ("m", "cpu", 1.0, True), ("n", "cuda:0", 1.0, True), ("n", "cpu", 0.5, True)]
    files = [
        measuring(name, device, speed, thin=thin, versions=here, cache=tmp_path).args[0]  # type: ignore[attr-defined]
        for name, device, speed, thin in [*variants, ("n", "cpu", 1.0, False)]
    ]
    other = here._replace(torch="0.0")
    files.append(measuring("n", "cpu", 1.0, thin=True, versions=other, cache=tmp_path).args[0])  # type: ignore[attr-defined]
    assert len(set(files)) == len(files) == 6


def test_the_address_that_is_printed_can_be_reached_from_elsewhere() -> None:
    assert reachable_address(Address("", 7117)).host not in ("", "0.0.0.0")
    assert reachable_address(Address("10.0.0.5", 7)) == Address("10.0.0.5", 7)
    assert join_line(Address("10.0.0.5", 7), "T") == "evener join 10.0.0.5:7 --token T"


def test_a_device_that_is_not_there_is_named() -> None:
    assert choose_device("cpu") == "cpu"
    with pytest.raises(InvalidInput, match="--device must be one of cpu"):
        choose_device("cuda:99")


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run_folder(str(tmp_path / "a" / "b")).is_dir()
    with pytest.raises(InvalidInput, match=r"cannot write into .*/file/run: Not a directory"):
        run_folder(str(tmp_path / "file" / "run"))


def test_joining_imports_no_pytorch() -> None:
    asked = "import sys, evener.run.ps_join; assert not {'torch', 'rich', 'evener.ps.run'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", asked], check=True, timeout=60, env=dict(os.environ))
