"""A run as it is submitted: what to train, on what data, and how the nodes agree. It travels to master and nodes."""

from __future__ import annotations

import msgspec

from evener.errors import require
from evener.schema import Part
from evener.sync.layout import StateLayout
from evener.sync.protocol import SyncProtocol, Workload


class Job(Part, frozen=True, kw_only=True):
    """What has to be done, by whom does not matter.

    Attributes:
        run: its name, also that of its folder: no other run has it.
        task: name of a built-in task, or of a file in the blob `code`.
        title: name of the task, for people.
        code: blob with the task's file and the modules beside it; empty for a built-in task.
        data: blob with the data; empty if they do not travel.
        data_dir: where nodes without a `--data` of their own look for the data; empty if the task knows.
        options: of the task, as text.
        precision: of computing.
        protocol: name of the way to agree, as the user typed it.
        agreement: the way itself.
        workload: samples, and when the run ends.
        layout: of the model's state.
        num_validation: samples for validation after every epoch; 0 for none.
        has_accuracy: whether the task says how many answers are right.
    """

    run: str
    task: str
    title: str
    code: str = ""
    data: str = ""
    data_dir: str = ""
    options: dict[str, str] = {}
    precision: str = "fp32"
    protocol: str
    agreement: SyncProtocol
    workload: Workload
    layout: StateLayout
    num_validation: int = 0
    has_accuracy: bool = True

    def __post_init__(self) -> None:
        is_plain = bool(self.run) and not set(self.run) & set("/\\\0") and not self.run.startswith(".")
        require(is_plain, "run", self.run, "a name without slashes that does not begin with a point")
        require(self.num_validation >= 0, "num_validation", self.num_validation, "zero or more")

    @property
    def blobs(self) -> tuple[str, ...]:
        """What a node has to have before it can begin."""
        return tuple(digest for digest in (self.code, self.data) if digest)


def encode_job(job: Job) -> bytes:
    """The job as it travels: in a buffer, for layouts and learning rates can be longer than a header may be."""
    return msgspec.msgpack.encode(job)


def decode_job(data: bytes | memoryview) -> Job:
    """The job in a buffer. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=Job)
