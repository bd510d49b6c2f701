"""The files of examples/launchers say what Evener, PyTorch's launcher and Kubernetes take; Ray's is run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from evener.cli.app import app_of
from support.documented import ROOT

FOLDER = ROOT / "examples" / "launchers"
MANIFESTS = sorted((FOLDER / "kubernetes").glob("*.yaml"))
_GROUP = typer.main.get_command(app_of())
assert isinstance(_GROUP, typer.core.TyperGroup)
_COMMANDS = _GROUP.commands


def documents(manifest: Path) -> list[Any]:
    return list(yaml.safe_load_all(manifest.read_text()))


def pods(document: Any) -> Iterator[Any]:
    """The descriptions of pods anywhere in a document of Kubernetes'."""
    if isinstance(document, dict):
        if "containers" in document:
            yield document
        for value in document.values():
            yield from pods(value)


ALL_PODS = [
    pytest.param(document, pod, id=f"{manifest.stem}-{i}")
    for manifest in MANIFESTS
    for document in documents(manifest)
    for i, pod in enumerate(pods(document))
]


def require_taken(words: list[str]) -> None:
    """The words behind `evener` are a command of it, with options that it has."""
    assert words[0] in _COMMANDS
    known = {name for one in _COMMANDS[words[0]].params for name in one.opts}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize(("document", "pod"), ALL_PODS)
def test_pod_commands_are_accepted_by_evener_and_torchrun(document: Any, pod: Any) -> None:
    for container in pod["containers"]:
        words = [*container.get("command", ["evener"]), *container.get("args", ())]
        require_taken(words[words.index("evener") + 1 :])
        if words[0] == "torchrun":
            from torch.distributed.run import get_args_parser

            parsed = get_args_parser().parse_args([re.sub(r"\$\(\w+\)", "1", word) for word in words[1:]])
            assert (parsed.module, parsed.training_script) == (True, "evener")


@pytest.mark.parametrize(("document", "pod"), ALL_PODS)
def test_pod_mounts_are_its_volumes(document: Any, pod: Any) -> None:
    claims = document["spec"].get("volumeClaimTemplates", ())
    volumes = {one["name"] for one in pod.get("volumes", ())} | {one["metadata"]["name"] for one in claims}
    mounts = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
    assert mounts == volumes


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_manifest_references_are_defined_or_created_by_its_header(manifest: Path) -> None:
    text = manifest.read_text()
    named = set(re.findall(r"(?:secretName|secretKeyRef: \{name|configMap: \{name|claimName): ([\w-]+)", text))
    made = set(re.findall(r"# .*kubectl create (?:configmap|secret generic) ([\w-]+)", text))
    claims = {one["metadata"]["name"] for one in documents(manifest) if one["kind"] == "PersistentVolumeClaim"}
    assert named == made | claims


def test_nodes_find_the_master_by_its_service() -> None:
    service, master = documents(FOLDER / "kubernetes" / "master.yaml")
    (nodes,) = documents(FOLDER / "kubernetes" / "nodes.yaml")
    words = nodes["spec"]["template"]["spec"]["containers"][0]["args"]
    assert words[1] == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert service["spec"]["selector"] == master["spec"]["template"]["metadata"]["labels"]
    assert master["spec"]["serviceName"] == service["metadata"]["name"]
    container = master["spec"]["template"]["spec"]["containers"][0]
    assert container["args"] == ["up", "--listen", ":7117"]
    assert container["ports"][0]["containerPort"] == 7117
    assert "/state/home/tokens/node" in (FOLDER / "kubernetes" / "nodes.yaml").read_text()
    assert container["env"] == [{"name": "EVENER_HOME", "value": "/state/home"}]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_match_the_kubernetes_schemas(manifest: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[kubernetes]'")
    for document in documents(manifest):
        if document["kind"] == "PyTorchJob":  # Kubeflow's: what is Kubernetes' own in it are the pods
            template = next(iter(document["spec"]["pytorchReplicaSpecs"].values()))["template"]
            document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}
        kubernetes_validate.validate(document, "1.33", strict=True)


def test_dockerfile_copies_existing_files() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+)", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in line.split()[:-1])
    extras = re.search(r"^ARG EXTRAS=(\S+)", text, re.MULTILINE)
    assert extras is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    assert re.search(r'^ENTRYPOINT \["evener"]', text, re.MULTILINE)
    assert all((ROOT / name).is_file() for name in re.findall(r"docker build -f (\S+)", text))
    for line in re.findall(r"docker run .* evener:cuda (.+)", text):
        require_taken(line.split())


def test_slurm_script_uses_existing_commands() -> None:
    job = FOLDER / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(job)], check=True, timeout=10)
    lines = re.findall(r"^srun evener (.+)", job.read_text(), re.MULTILINE)
    assert lines
    for line in lines:
        require_taken(shlex.split(line))


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_ray_train_workers_are_ranks(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="pip install -e '.[ray]'")
    words = ["--workers", "2", "digits", "--epochs", "1", "--option", "channels=8", "--option", "blocks=1"]
    result = subprocess.run(
        [sys.executable, str(FOLDER / "ray_train.py"), *words],
        cwd=tmp_path,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "'validation_accuracy': 0." in result.stdout
    kept = re.search(r"weights and record are in (\S+)", result.stdout)
    assert kept is not None
    assert {"model.safetensors", "record.json"} <= {path.name for path in Path(kept[1]).iterdir()}
