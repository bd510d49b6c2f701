"""`evener up`, `join`, `nodes`, `train --agreement` and `down`, as typed: everything travels, everything ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open

from evener.records.profile import ClusterProfile
from evener.records.record import TrainRecord
from evener.records.schema import read_noun
from support.command_cluster import cluster, wait_until
from support.commands import TINY, evener
from support.sockets import free_port

pytestmark = pytest.mark.slow
TASKS = Path(TINY).parent
READER = """
import numpy as np, torch
from pathlib import Path
from torch import nn
from torch.utils.data import TensorDataset
from evener import Task

def read(folder):
    values = np.load(folder / "inner" / "values.npz")
    return TensorDataset(torch.from_numpy(values["x"]), torch.from_numpy(values["y"]))

def task(data_dir: Path) -> Task:
    return Task(model=lambda: nn.Linear(4, 3), loss=nn.functional.cross_entropy, batch_size=8, epochs=2,
                train_data=lambda: read(data_dir), validation_data=lambda: read(data_dir))
"""


def test_code_and_data_reach_the_nodes_and_down_ends_all(tmp_path: Path) -> None:
    with cluster() as ps:
        for name in ("one", "two"):
            ps.join(name)
        nodes = ps.wait_for_nodes()
        assert {node.state for node in nodes.values()} == {"present"}
        assert all((node.score or 0) > 1 for node in nodes.values())
        said = json.loads(ps.evener("nodes", "--json", "--home", str(ps.home)).stdout)
        assert [node["name"] for node in said["nodes"]] == ["one", "two"]
        assert re.search(r"one .* cpu .* waits .* present", ps.evener("nodes", "--home", str(ps.home)).stdout)
        profile = read_noun(ps.home / "cluster.json", ClusterProfile)
        assert {device.node for device in profile.devices} == {"one", "two"}
        for file in ("identity.json", "master.json"):
            assert stat.S_IMODE((ps.home / file).stat().st_mode) == 0o600

        code = tmp_path / "code"  # gone before the next run: what the nodes have is what was sent
        code.mkdir()
        for file in ("smooth.py", "smooth_parts.py"):
            shutil.copy(TASKS / file, code)
        summary = ps.train(str(code / "smooth.py"), "--agreement", "sync", "--epochs", "8", "--output", "smooth")
        assert summary["validation_accuracy"] > 0.6
        assert {node["name"] for node in summary["nodes"]} == {"one", "two"}
        assert all(node["bytes_sent"] > 0 for node in summary["nodes"])
        assert {"seconds", "samples_per_second", "final_loss", "agreement", "bytes_saved"} <= summary.keys()
        with safe_open(ps.folder / "smooth" / "model.safetensors", framework="numpy") as weights:
            assert set(weights.keys()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert read_noun(ps.folder / "smooth" / "record.json", TrainRecord).agreement == "sync"
        assert len(list((ps.folder / "cache-one" / "blobs").iterdir())) == 1

        data = write_data(tmp_path / "data")
        (tmp_path / "reader.py").write_text(READER)
        words = (str(tmp_path / "reader.py"), "--data", str(data), "--ship-data", "--agreement", "average")
        ps.train(*words)
        blobs = sorted((ps.folder / "cache-one" / "blobs").iterdir())
        assert len(blobs) == 3
        before = [(path.name, path.stat().st_ctime_ns) for path in blobs]
        ps.train(*words)
        assert [(p.name, p.stat().st_ctime_ns) for p in sorted((ps.folder / "cache-one" / "blobs").iterdir())] == (
            before
        )
        ps.down()
        assert [process.wait() for process in ps.nodes.values()] == [0, 0]
        assert ps.master.wait() == 0
        assert "dismissed by the master: `evener down` was typed" in ps.said("one")


def write_data(folder: Path) -> Path:
    import numpy as np

    draw = np.random.default_rng(0)
    (folder / "inner").mkdir(parents=True)
    values = {"x": draw.standard_normal((40, 4)).astype(np.float32), "y": draw.integers(0, 3, 40)}
    np.savez(folder / "inner" / "values.npz", **values)  # type: ignore[arg-type]
    return folder


def test_run_survives_killed_nodes_and_a_killed_master() -> None:
    words = (str(TASKS / "smooth.py"), "--option", "samples=4000", "--agreement", "sync", "--output", "out")
    with cluster("--patience", "3") as ps:
        for name in ("killed", "stopped", "steady"):
            ps.join(name)
        ps.wait_for_nodes()
        training = ps.start_training(*words, "--epochs", "60")
        wait_until(lambda: ps.version() > 20, "that work begins")
        ps.nodes["killed"].kill()
        ps.nodes["stopped"].send_signal(signal.SIGSTOP)
        wait_until(lambda: ps.state("stopped") == ps.state("killed") == "excluded", "that both are excluded")
        ps.nodes["stopped"].send_signal(signal.SIGCONT)
        wait_until(lambda: ps.state("stopped") == "present", "that the stopped one is taken back")
        version = ps.version()
        ps.master.kill()
        ps.master.wait()
        ps.up()
        wait_until(lambda: ps.version() > version, "that the run goes on")
        ps.join("late")
        wait_until(lambda: ps.state("late") == "present", "that another one joins")
        training.send_signal(signal.SIGINT)
        assert training.wait(60) == 130
        record = read_noun(ps.folder / "out" / "record.json", TrainRecord)
        ps.down()
        said = (ps.folder / "train.out").read_text()
    happened = {event.kind for event in record.events}
    assert {"joined", "away", "excluded", "back", "master restarted"} <= happened
    assert "master lost" in said
    assert record.steps[-1].step > version
    assert {"killed", "stopped", "steady"} <= {node.name for node in record.nodes}


def test_run_survives_its_killed_command() -> None:
    words = (str(TASKS / "smooth.py"), "--agreement", "sync", "--option", "samples=2000", "--epochs", "12")
    with cluster("--patience", "120") as ps:
        ps.join("one")
        ps.wait_for_nodes()
        training = ps.start_training(*words, "--output", "out")
        wait_until(lambda: ps.version() > 0, "that work begins")
        run = ps.ask().run
        assert run is not None
        training.kill()
        training.wait()
        ps.nodes["one"].send_signal(signal.SIGSTOP)  # so that the run cannot end before the next command has begun
        again = ps.evener("train", *words, "--home", str(ps.home))
        assert again.returncode == 2
        assert re.search(rf"the master is busy with run {run.run}, \d+ updates so far: wait for it", again.stderr)
        ps.nodes["one"].send_signal(signal.SIGCONT)
        folder = Path(run.folder)
        wait_until(lambda: (folder / "end.json").exists(), "that the run ends")
        assert read_noun(folder / "record.json", TrainRecord).steps[-1].step == 12 * 200
        assert (folder / "model.safetensors").exists()
        ps.down()


def test_thin_tasks_run_without_pytorch_and_others_are_rejected() -> None:
    with cluster() as ps:
        ps.join("thin", has_torch=False)
        assert (ps.wait_for_nodes()["thin"].score or 0) > 1
        small = ("--option", "channels=4", "--option", "blocks=1", "--epochs", "1", "--output", "digits")
        summary = ps.train("digits", "--agreement", "sync", *small, has_torch=False)
        assert [node["name"] for node in summary["nodes"]] == ["thin"]
        with safe_open(ps.folder / "digits" / "model.safetensors", framework="numpy") as weights:
            assert "0.weight" in set(weights.keys())
        result = ps.evener("train", TINY, "--agreement", "average", "--home", str(ps.home))
        assert result.returncode == 3
        sentence = "node thin cannot take part: task tiny has no thin twin, so this node needs PyTorch: pip install"
        assert sentence in result.stderr
        ps.down()
        assert ps.nodes["thin"].wait(20) == 0


def test_rejected_join_gives_its_reason_within_ten_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from evener.cli.app import main

    with cluster() as ps, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        host, _, port = ps.address.rpartition(":")
        other = "evener1-" + "A" * 70
        nobody = free_port()
        cases = {
            (ps.address, other): "the token is mistyped: its last characters do not fit",
            (f"{host}:{nobody}", ps.token): rf"{host}, port {nobody}: .*nothing listens at that port; start `evener",
            (f"{host}:{silent.getsockname()[1]}", ps.token): rf"port {silent.getsockname()[1]}: .*then nothing came",
            ("no-such-machine.invalid:7117", ps.token): "no-such-machine.invalid, port 7117: the host name is unknown",
            (f"{host}:{port}x", ps.token): "address must be HOST:PORT",
        }
        for (address, token), sentence in cases.items():
            words = ["evener", "join", address, "--token", token, "--device", "cpu", "--cache", str(tmp_path)]
            monkeypatch.setattr(sys, "argv", words)
            begun = time.monotonic()
            with pytest.raises(SystemExit) as stop:
                main()
            assert time.monotonic() - begun < 20  # after ten seconds, on a machine that does nothing else
            assert stop.value.code in (2, 4)
            assert re.search(sentence, said := capsys.readouterr().err), said
        ps.down()


def test_token_of_another_master_is_rejected() -> None:
    with cluster() as ps, cluster() as other:
        result = ps.evener("join", ps.address, "--token", other.token, "--cache", str(ps.folder))
        assert result.returncode == 4
        assert "its certificate does not match the token" in result.stderr
        assert "copy the token that this master printed" in result.stderr
        ps.down()
        other.down()


def test_insecure_needs_consent_on_both_sides(tmp_path: Path) -> None:
    with cluster("--insecure") as ps:
        assert "warning: --insecure: nothing is encrypted" in ps.said("up")
        result = ps.evener("join", ps.address, "--token", ps.token, "--cache", str(tmp_path))
        assert result.returncode == 2
        assert "add --insecure if that is what you want" in result.stderr
        ps.join("open", "--insecure")
        ps.wait_for_nodes()
        ps.down()


def test_two_unnamed_nodes_join_from_one_machine() -> None:
    with cluster() as ps:
        for number in range(2):
            ps.join_unnamed(f"node-{number}")
        wait_until(lambda: sum(node.score is not None for node in ps.ask().nodes) == 2, "that both nodes join")
        names = sorted(node.name for node in ps.ask().nodes)
        assert all(process.poll() is None for process in ps.nodes.values())
        ps.down()
    base = names[0].removesuffix("-2")
    assert re.fullmatch(rf"{re.escape(base)}(-\d+)?", names[1])
    assert names[0] != names[1]
    assert base.startswith(socket.gethostname())


def test_state_dir_has_one_master(tmp_path: Path) -> None:
    with cluster() as ps:
        second = ps.evener("up", "--home", str(ps.home))
        assert second.returncode == 2
        assert "a master already runs in" in second.stderr
        assert "`evener down`" in second.stderr
        ps.down()
    nobody = evener("nodes", "--home", str(tmp_path / "none"), cwd=tmp_path)
    assert nobody.returncode == 2
    assert "no master was ever started in" in nobody.stderr


def test_nodes_wait_for_a_master_stopped_by_sigterm() -> None:
    with cluster() as ps:
        ps.join("one")
        ps.wait_for_nodes()
        ps.master.send_signal(signal.SIGTERM)
        assert ps.master.wait(20) == 0
        assert "its nodes wait for `evener up`" in ps.said("up")
        ps.up()
        ps.wait_for_nodes()
        assert ps.nodes["one"].poll() is None
        os.kill(ps.nodes["one"].pid, signal.SIGINT)
        assert ps.nodes["one"].wait(20) == 130
        wait_until(lambda: ps.state("one") == "left", "that the master knows")
        ps.down()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("--agreement", "gossip"),
            "--agreement must be one of sync, async, bounded, average, federated, diloco, got 'gossip'",
        ),
        (("--staleness", "2"), "--staleness belongs to --agreement bounded"),
        (("--agreement", "sync", "--staleness", "2"), "--staleness belongs to --agreement bounded"),
        (("--agreement", "sync", "--local-steps", "2"), "--local-steps belongs to --agreement average or diloco"),
        (("--agreement", "average", "--fraction", "0.5"), "--fraction belongs to --agreement federated"),
        (("--agreement", "federated", "--fraction", "2"), "--fraction must be above 0 and at most 1"),
        (("--agreement", "sync", "--stationary"), "--stationary goes with --agreement average or federated"),
        (("--agreement", "average", "--shares", "2,1"), "--shares goes with --agreement where data stay"),
        (
            ("--agreement", "average", "--stationary", "--local-steps", "5"),
            "--local-steps does not go with data that stay",
        ),
        (("--agreement", "average", "--outer-lr", "1"), "--outer-lr belongs to --agreement diloco"),
        (("--agreement", "async", "--overlap"), "--overlap belongs to --agreement average or diloco"),
        (
            ("--agreement", "sync", "--compress", "int4"),
            "--compress must be one of none, bf16, int8, top-k, got 'int4'",
        ),
        (("--compress", "int8"), "--compress belongs to --agreement"),
        (("--ship-data",), "--ship-data belongs to --agreement"),
        (("--master", "a:1"), "--master ADDRESS and --token-file FILE belong together"),
        (("--token", "t"), "--token belongs to --agreement, or to ranks on the nodes of a master"),
        (("--master", "a:1", "--resume"), "--resume does not go with the nodes of a master: leave it out"),
        (("--agreement", "sync", "--resume"), "--resume does not go with --agreement"),
        (("--agreement", "sync", "--devices", "cpu"), "--devices does not go with --agreement"),
        (("--agreement", "sync", "--ship-data"), "--ship-data needs --data DIR"),
        (
            ("--agreement", "sync", "--local-nodes", "1", "--master", "a:1", "--token", "x"),
            "have a master of their own",
        ),
        (("--agreement", "sync", "--master", "a:1"), "--master ADDRESS and --token-file FILE belong together"),
        (("--agreement", "diloco", "--local-steps", "epoch"), "--local-steps must be a number with --agreement diloco"),
        (
            ("--agreement", "average", "--local-steps", "0"),
            "--local-steps must be a positive number of at most 9 digits, or epoch",
        ),
        (("--agreement", "bounded", "--staleness", "0"), "--staleness must be positive, and at most 1000000000, got 0"),
        (("--agreement", "sync", "--precision", "fp16"), "--precision must be fp32, bf16 or fp64 with --agreement"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_contradictory_options_give_one_sentence(
    tmp_path: Path,
    words: tuple[str, ...],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from evener.cli.app import main

    monkeypatch.setattr(sys, "argv", ["evener", "train", TINY, "--output", str(tmp_path), *words])
    monkeypatch.setenv("EVENER_HOME", str(tmp_path / "home"))
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_only_nodes_of_the_system_file_join_and_the_run_awaits_them(tmp_path: Path) -> None:
    with cluster() as first:
        first.join("ada")
        first.join("bob", "--speed", "0.5")
        first.wait_for_nodes()
        described = tmp_path / "machines.json"
        shutil.copy(first.home / "cluster.json", described)
    profile = read_noun(described, ClusterProfile)
    assert {device.node: device.address for device in profile.devices} == {"ada": "127.0.0.1", "bob": "127.0.0.1"}
    with cluster("--system", str(described)) as ps:
        ps.join("eve")
        assert ps.nodes["eve"].wait(60) != 0
        assert "machines.json describes no node eve, but" in ps.said("eve")
        del ps.nodes["eve"]
        ps.join("ada")
        ps.wait_for_nodes()
        words = ("train", TINY, "--agreement", "federated", "--system", str(described), "--patience", "2")
        alone = ps.evener(*words, "--home", str(ps.home))
        assert "evener: bob of machines.json did not join within 2 s" in alone.stderr
        ps.join("bob")
        ps.wait_for_nodes()
        ps.train(TINY, "--agreement", "federated", "--system", str(described), "--output", str(tmp_path / "run"))
    record = read_noun(tmp_path / "run" / "record.json", TrainRecord)
    shares = {node.name: node.share for node in record.nodes}
    assert shares["ada"] > shares["bob"]
