"""What a node gives the process of a rank that it starts for its master."""

from __future__ import annotations

from evener.records.schema import Part


class RankTask(Part, frozen=True, kw_only=True):
    """What a rank's process is given, as plain values.

    Attributes:
        config: what was asked for, as it travels.
        task: name of a built-in task, or the task's file here.
        data: folder of the data; None if the task knows.
        folder: where it may write.
        towards: host name of the master: by what leads there, the other ranks come.
        place: its own among the ranks, as it travels.
        process: its number.
        resumes: whether it goes on from the checkpoint in its folder.
        brings_program: whether the file `task` defines what a rank runs.
    """

    config: bytes
    task: str
    data: str | None
    folder: str
    towards: str
    place: bytes
    process: int
    resumes: bool = False
    brings_program: bool = False
