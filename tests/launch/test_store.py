"""The secret of ranks comes from whoever starts them; the store is kept at one address."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from evener.comm.signed_store import SignedStore
from evener.launch.store import connect_store, keep_store, launcher_secret, new_secret
from evener.records.errors import InvalidInput

ONE_MACHINE = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
TWO_MACHINES = ONE_MACHINE | {"LOCAL_WORLD_SIZE": "1"}


def test_store_listens_at_one_address_only() -> None:
    secret = new_secret()
    kept, port = keep_store("127.0.0.1", 0, secret)
    assert kept.inner.host == "127.0.0.1"
    connect_store("127.0.0.1", port, secret, patience=5).set("a", "b")
    assert kept.get("a") == b"b"
    listening = Path("/proc/net/tcp6").read_text() if Path("/proc/net/tcp6").exists() else ""
    assert f"{port:04X}" not in {line.split()[1][-4:] for line in listening.splitlines()[1:]}


def test_store_of_an_unreachable_name_listens_at_the_own_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("evener.launch.store.own_address", lambda: "127.0.0.1")
    kept, _ = keep_store("192.0.2.1", 0, new_secret())
    assert isinstance(kept, SignedStore)
    assert kept.inner.host == "127.0.0.1"


def test_secret_from_the_environment_is_used() -> None:
    given = {"EVENER_SECRET": "0123456789abcdef"}
    secret, file = launcher_secret(TWO_MACHINES | given)
    assert (len(secret), file) == (16, None)
    assert launcher_secret(ONE_MACHINE | given) == (secret, None)
    assert launcher_secret(ONE_MACHINE | {"EVENER_SECRET": "another one of this length"})[0] != secret
    with pytest.raises(InvalidInput, match=r"\$EVENER_SECRET must have 16 characters or more, got 5"):
        launcher_secret(TWO_MACHINES | {"EVENER_SECRET": "12345"})


def test_ranks_on_several_machines_need_a_secret() -> None:
    with pytest.raises(InvalidInput, match=r"set \$EVENER_SECRET to the same value on all of them, such as .*openssl"):
        launcher_secret(TWO_MACHINES)
    with pytest.raises(InvalidInput, match="several machines"):
        launcher_secret({"WORLD_SIZE": "2"})
    assert launcher_secret({"WORLD_SIZE": "1"})[1] is None


def test_secret_on_one_machine_is_in_a_private_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    secret, file = launcher_secret(ONE_MACHINE)
    assert file is not None
    assert file.stat().st_mode & 0o777 == 0o600
    assert launcher_secret(ONE_MACHINE) == (secret, file)
    assert launcher_secret(ONE_MACHINE | {"MASTER_PORT": "1"})[0] != secret
    os.chmod(file, 0o644)
    with pytest.raises(InvalidInput, match="can be read by others: remove it, or set"):
        launcher_secret(ONE_MACHINE)
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(b"planted")
    with pytest.raises(InvalidInput, match="can be read by others"):
        launcher_secret(ONE_MACHINE)
