"""What follows from what a master's nodes were found to be, and from what a run does with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from evener.commands.doctor_nodes import findings_of, look_at_nodes, look_before_run, question_of
from evener.commands.task_look import look_at_task
from evener.doctor.facts import FolderFacts, LoadFacts, MachineFacts
from evener.doctor.finding import faults
from evener.doctor.peers import DataFacts
from evener.ps.client import MasterClient
from evener.ps.node.blob_writer import BlobWriter
from evener.ps.protocol.examination_messages import Examination, ExaminedNode, NodeReport
from evener.ps.protocol.status import ClusterStatus, NodeStatus
from evener.records.errors import InvalidInput
from support.machine_facts import SOUND
from support.refusals import refused

FULL = replace(
    SOUND, folders=(FolderFacts(purpose="cache", path="/c", free_bytes=1, has_inodes=True, is_writable=True),)
)
BUSY = replace(SOUND, load=LoadFacts(cores=8, busy_cores=6.0))
ONLY_ARRAYS = """
import numpy as np
from evener import ThinTask
from evener import autodiff as ad

def thin_task(size: int = 3) -> ThinTask:
    return ThinTask(name="mine", model=lambda: ad.nn.Linear(2, 2), loss=ad.functional.cross_entropy,
                    train_data=lambda: (np.ones((size, 2), np.float32), np.zeros(size, np.int64)),
                    optimizer=lambda parameters: ad.optim.SGD(parameters, lr=0.1))
"""


def node(name: str, facts: MachineFacts | None = SOUND, doing: str = "waits") -> ExaminedNode:
    report = None if facts is None else NodeReport(facts=replace(facts, machine=name))
    return ExaminedNode(name=name, report=report, doing=doing)


def told(*nodes: ExaminedNode) -> list[str]:
    return [one.words for one in faults(findings_of(Examination(nodes=(node("master", doing=""), *nodes))))]


class Client:
    """A master that tells what the test says."""

    def __init__(self, *nodes: ExaminedNode, address: str = "10.0.0.5", state: str = "present") -> None:
        self.examination = Examination(nodes=(node("master", doing=""), *nodes))
        self.status = ClusterStatus(address=":7117", nodes=tuple(self._status(one, address, state) for one in nodes))

    def ask(self) -> ClusterStatus:
        return self.status

    def examine(self, *_: Any) -> Examination:
        return self.examination

    def _status(self, one: ExaminedNode, address: str, state: str) -> NodeStatus:
        return NodeStatus(
            name=one.name, address=f"{address}, port 4711", device="cpu", score=1.0, state=state,
            reason="silent for 9 s", seconds=None, doing=one.doing, samples=0,
            samples_per_second=0.0, bytes_sent=0, bytes_received=0,
        )  # fmt: skip


def client(*nodes: ExaminedNode, **words: str) -> MasterClient:
    return cast(MasterClient, Client(*nodes, **words))


def test_sound_nodes_have_no_faults() -> None:
    assert told(node("ada"), node("bob", replace(SOUND, torch=""))) == []


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (node("bob", FULL), "bob: /c (cache) has 0 MB free; remove files there"),
        (node("bob", BUSY), "bob: others keep 6.0 of 8 cores busy; end them"),
        (node("bob", None), "bob: it did not report on its machine in time; look at that machine itself"),
        (node("bob", None, "trains"), "in time, and trains when it was asked; wait until the run is over"),
        (node("bob", replace(SOUND, torch="2.11.0")), "bob: it runs PyTorch 2.11, master 2.13"),
        (replace(node("bob"), ahead=-3600.0), "bob: its clock is 3600 s behind that of master"),
    ],
)
def test_fault_of_a_node_is_named(planted: ExaminedNode, words: str) -> None:
    [fault] = told(node("ada"), planted)
    assert words in fault


def test_gloo_interface_of_the_master_is_not_checked() -> None:
    loopback = replace(SOUND, network=replace(SOUND.network, gloo_interfaces="lo"))
    examination = Examination(nodes=(node("master", loopback, doing=""), node("ada", loopback)))
    assert [(one.machine, one.what) for one in faults(findings_of(examination))] == [("ada", "interface")]


def test_load_of_a_training_node_is_no_fault() -> None:
    assert told(node("bob", BUSY, "trains")) == []


def test_missing_or_excluded_nodes_are_named() -> None:
    [fault] = faults(look_at_nodes(client(node("ada"), state="excluded")))[:1]
    assert fault.words.startswith("ada: it is excluded: silent for 9 s; look at that machine")
    assert faults(look_at_nodes(client()))[0].cure == "type `evener join` on every machine"


def test_run_starts_if_at_least_one_node_is_sound() -> None:
    assert [one.machine for one in look_before_run(client(node("ada"), node("bob", FULL)))] == ["bob"]
    assert look_before_run(client(node("bob", FULL), address="127.0.0.1")) == []
    with refused(InvalidInput):
        look_before_run(client(node("bob", FULL)))


def test_run_is_rejected_if_its_nodes_have_different_data() -> None:
    ours, others = (DataFacts(samples=3, fingerprint=f"NumPy:{digest}") for digest in ("aa", "bb"))
    alike = [with_data(name, ours) for name in ("ada", "bob")]
    assert look_before_run(client(*alike)) == []
    with refused(InvalidInput):
        look_before_run(client(alike[0], with_data("bob", others)))


def with_data(name: str, data: DataFacts) -> ExaminedNode:
    sound = node(name)
    assert sound.report is not None
    return replace(sound, report=replace(sound.report, data=data))


def test_task_is_sent_with_the_files_that_it_imports(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ONLY_ARRAYS)
    question, code = question_of(str(tmp_path / "mine.py"), tmp_path, {"size": "4"})
    assert (question.task, question.data_dir, question.options) == ("mine.py", str(tmp_path), {"size": "4"})
    writer = BlobWriter(question.code, tmp_path / "blobs")
    writer.add_head(code)
    assert (writer.finish() / "mine.py").read_text() == ONLY_ARRAYS
    writer.close()
    assert question_of("digits", None, {})[1] == b""
    (tmp_path / "mine.py").write_text(ONLY_ARRAYS + f"# {'x' * 2**20}\n")
    with refused(InvalidInput):
        question_of(str(tmp_path / "mine.py"), None, {})


def test_data_facts_differ_by_samples_and_contents(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(ONLY_ARRAYS)
    found = [look_at_task(str(path), options={"size": size}, thin=True).data for size in ("3", "3", "4")]
    path.write_text(ONLY_ARRAYS.replace("np.ones", "np.zeros"))
    other = look_at_task(str(path), thin=True).data
    assert found[0] == found[1]
    assert [one.samples for one in found if one] == [3, 3, 4]
    assert other is not None
    assert other.fingerprint.startswith("NumPy:")
    assert other not in found
    once, again, thin = (look_at_task("digits", thin=thin).data for thin in (False, False, True))
    assert once == again
    assert once is not None
    assert thin is not None
    assert (once.kind, thin.kind, once.samples == thin.samples) == ("PyTorch", "NumPy", True)
