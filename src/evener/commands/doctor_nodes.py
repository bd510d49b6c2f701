"""The doctor's examination of a master's nodes and the links between them. Needs no PyTorch."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from evener.data.tasks.load import is_path, thin_twin
from evener.doctor.finding import Finding, faults, found
from evener.doctor.machine_checks import check_machine
from evener.doctor.peers import PeerFacts, check_peers
from evener.ps.client import MasterClient
from evener.ps.master.examination.examinations import MASTER, is_of_this_machine
from evener.ps.protocol.blob import Blob
from evener.ps.protocol.examination_messages import MAX_CODE_BYTES, Examination, ExaminedNode, TaskQuestion
from evener.ps.protocol.status import NodeStatus
from evener.records.errors import InvalidInput, MissingFile, TrainingFailed

SECONDS = 8.0
"""Time limit for machines, task and links."""
_BEFORE_A_RUN = ("versions", "GPU", "memory", "disk", "load", "heat", "clock", "data")
"""Findings that matter to a run with an agreement, whose nodes connect only to the master, over one port."""
_IDLE = "waits"


def look_at_nodes(client: MasterClient, question: TaskQuestion | None = None, code: bytes = b"") -> list[Finding]:
    """Return findings on the master's machine, its nodes, and the links between them.

    Args:
        client: of the master.
        question: a task for them to load, if any.
        code: the stream of its files.

    Raises:
        InvalidInput: the master cannot examine them now.
    """
    nodes = client.ask().nodes
    return [*findings_of(client.examine(SECONDS, question, code)), *missing(nodes)]


def look_before_run(client: MasterClient, question: TaskQuestion | None = None, code: bytes = b"") -> list[Finding]:
    """Return faults of the nodes before a run; none if all nodes are on one machine.

    Args:
        client: of the master.
        question: the task of the run, whose data must be the same everywhere; None if they may differ.
        code: the stream of its files.

    Raises:
        InvalidInput: no node can take part, or one has different data; says why.
    """
    nodes = [node for node in client.ask().nodes if node.state == "present"]
    if all(is_of_this_machine(node.address) for node in nodes):
        return []
    findings = [one for one in findings_of(client.examine(SECONDS, question, code)) if one.what in _BEFORE_A_RUN]
    broken = {one.machine: one for one in findings if one.severity == "error"}
    if all(name in broken for name in (node.name for node in nodes)):
        reasons = "; ".join(one.words for one in broken.values())
        raise InvalidInput(f"no node can take part: {reasons} (--no-preflight: start without looking)")
    if other := [one.words for one in findings if one.what == "data" and one.severity == "error"]:
        raise InvalidInput(f"{'; '.join(other)} (--no-preflight: start without looking)")
    return faults(findings)


def findings_of(examination: Examination) -> list[Finding]:
    """Return the findings of an examination: on each machine, then between them."""
    singly = [finding for node in examination.nodes for finding in _findings_of_one(node)]
    return [*singly, *check_peers([peer for node in examination.nodes for peer in _peers(node)])]


def missing(nodes: Sequence[NodeStatus]) -> Iterator[Finding]:
    """Yield findings on nodes that should be present but are not."""
    here = [node for node in nodes if node.state == "present"]
    for node in nodes:
        if node.state not in ("present", "left"):
            yield found(
                node.name, "node", "warning", f"it is {node.state}: {node.reason}"[:4000],
                "look at that machine; `evener join` there takes its place again",
            )  # fmt: skip
    if not here:
        yield found(MASTER, "node", "warning", "no node is here", "type `evener join` on every machine")


def code_of(task: str) -> Blob:
    """Return the files of a task and of its thin twin."""
    path = Path(task).resolve()
    twin = thin_twin(path)
    return Blob(path.parent, sorted({*files_needed(path), *(files_needed(twin) if twin else ())}))


def question_of(task: str, data: Path | None, options: dict[str, str]) -> tuple[TaskQuestion, bytes]:
    """Return a task for nodes to load, and the stream of its files.

    Raises:
        InvalidInput: the files are too large to send for an examination.
    """
    blob, name = None, task
    if is_path(task):
        name, blob = Path(task).name, code_of(task)
        if blob.num_bytes > MAX_CODE_BYTES:
            raise InvalidInput(
                f"--task: its files are {blob.num_bytes} bytes, and {MAX_CODE_BYTES} may travel to be looked at; "
                "leave --task out: a run sends them, and says which node cannot load them"
            )
    question = TaskQuestion(
        task=name,
        code=blob.digest if blob else "",
        data_dir=str(data.resolve()) if data else "",
        options=options,
    )
    return question, blob.read(0, blob.num_bytes) if blob else b""


def _findings_of_one(node: ExaminedNode) -> Iterator[Finding]:
    is_at_work = node.doing not in (_IDLE, "")
    if node.report is None:
        work = f", and {node.doing} when it was asked" if is_at_work else ""
        yield found(
            node.name, "answer", "warning", f"it did not report on its machine in time{work}",
            "wait until the run is over and ask again" if is_at_work else "look at that machine itself: evener doctor",
        )  # fmt: skip
        return
    for finding in check_machine(node.report.facts):
        is_own_load = is_at_work and finding.what == "load"  # the node's work is the load
        if not (is_own_load or (node.name == MASTER and finding.what == "interface")):  # no rank runs on the master
            yield finding


def _peers(node: ExaminedNode) -> Iterator[PeerFacts]:
    if node.report is not None:
        facts = node.report.facts
        yield PeerFacts(
            machine=node.name,
            evener=facts.evener,
            python=facts.python,
            torch=facts.torch,
            ahead=node.ahead,
            network=facts.network,
            uses_gloo=False,
            is_rank=False,
            links=node.links.links,
            unreached=node.links.unreached,
            data=node.report.data,
        )


Name = tuple[str, ...]
"""A dotted name of a module, in parts."""


def files_needed(task_file: Path) -> list[str]:
    """The task file and all modules beside it that it imports, directly or not, as paths relative to its folder.

    Imports whose names are computed at run time are not found, and neither are files that are only opened.

    Raises:
        MissingFile: there is no such task file.
        TrainingFailed: one of the files is not Python.
    """
    root, files, open_files = task_file.parent, set[str](), [task_file.name]
    if not task_file.is_file():
        raise MissingFile(f"there is no task file {task_file}")
    while open_files:
        path = open_files.pop()
        if path not in files:
            files.add(path)
            for module in _imports(root, path):
                open_files += _files_of(root, module)
    return sorted(files)


def _imports(root: Path, path: str) -> Iterator[Name]:
    """Names that the file `path` imports, each with everything that may be a module of it."""
    package = PurePosixPath(path).parent.parts
    for node in ast.walk(_parse(root / path)):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = above + tuple(node.module.split(".") if node.module else ())
            yield base
            yield from ((*base, alias.name) for alias in node.names)


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or "?"
        raise TrainingFailed(f"{file} line {line}: {type(error).__name__}: {str(error).partition(' (')[0]}") from error


def _files_of(root: Path, module: Name) -> Iterator[str]:
    """The files, as far as they lie below `root`, that importing `module` runs: its packages' and its own."""
    for depth in range(1, len(module) + 1):
        place = PurePosixPath(*module[:depth])
        for candidate in (place / "__init__.py", place.with_suffix(".py")):
            if (root / candidate).is_file():
                yield str(candidate)
                break
