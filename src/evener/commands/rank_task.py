"""Parameters of a rank's process, from `rank_host` to `node_rank`."""

from __future__ import annotations

from evener.records.schema import Part


class RankTask(Part, frozen=True, kw_only=True):
    """The task of a rank's process, as plain values.

    Attributes:
        config: of the run, encoded.
        task: name of a built-in task, or the task's file here.
        data: folder of the data; None if the task knows.
        folder: to write to.
        towards: host name of the master; the interface towards it also reaches the other ranks.
        place: of this rank among all, encoded.
        process: number of the process.
        resumes: whether it resumes from the checkpoint in its folder.
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
