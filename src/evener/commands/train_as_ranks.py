"""`evener train --master` without `--agreement`: ranks, one on every node of a master.

pack code and data -> submit -> watch -> record and weights

The master starts the ranks and manages their generations (`ps/master/ranks/rank_training.py`); each of them runs
`training/rank.py`, as on local nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from evener.commands.submission import PreparedRun, new_run_name, pack, submit_run
from evener.config.run_config import RunConfig, encode_config
from evener.data.tasks.load import is_path
from evener.ps.protocol.blob import Blob
from evener.ps.protocol.rank_messages import RankJob
from evener.records.plan import is_of_teams
from evener.records.record import TrainRecord
from evener.report.tables import summary
from evener.training.console import open_console, print_line
from evener.training.partial_record import RunRequest, request_of

_CHECKPOINT_INTERVAL = "600s"
"""Between checkpoints within an epoch, which may take hours on other people's nodes."""


def train_as_ranks(config: RunConfig, *, as_json: bool) -> None:
    """Train on the nodes of a master as ranks.

    Raises:
        EvenerError: the request is impossible, or the run ended early.
    """
    record = submit_ranks(config, to_stderr=as_json)
    if as_json:
        print_line(json.dumps(summary(record)))


def submit_ranks(
    config: RunConfig, *, to_stderr: bool, program: Blob | None = None, request: RunRequest | None = None
) -> TrainRecord:
    """Train on nodes; return the record, when the run's folder has all results.

    Args:
        config: of the run.
        to_stderr: keep stdout free.
        program: files to send instead of the task's; the file named like the task defines the program of a rank.
        request: for the record; the default is that of `config`.

    Raises:
        EvenerError: see `train_as_ranks`.
    """
    console = open_console(to_stderr)
    console.quiet = config.quiet
    blobs, reads_early = pack(config, console.print, is_task=program is None)
    blobs |= {"code": program} if program is not None else {}
    digests = {what: blob.digest for what, blob in blobs.items()}
    job = job_of(config, digests, brings_program=program is not None)
    job = replace(job, reads_early=reads_early)
    return submit_run(
        config,
        lambda *_: PreparedRun(job, None, list(blobs.values())),
        to_stderr=to_stderr,
        request=request or request_of(config),
    )


def job_of(config: RunConfig, digests: Mapping[str, str], *, brings_program: bool = False) -> RankJob:
    """Return the job of the ranks, without options that concern only this machine.

    Args:
        config: of the run.
        digests: of `code` and `data`, if they are sent.
        brings_program: whether the file of the task defines what a rank runs.
    """
    goes_on = config.columns == 1 and not is_of_teams(config.strategy)
    shipped = replace(
        config,
        elastic=True if goes_on else None,
        home=None,
        master=None,
        token=None,
        token_file=None,
        dashboard=None,
        ship_data=False,
        keeps_checkpoints=False,
        checkpoint_every=config.checkpoint_every or _CHECKPOINT_INTERVAL,
    )
    return RankJob(
        run=new_run_name(config),
        task=Path(config.task).name if is_path(config.task) else config.task,
        title=Path(config.task).stem,
        data_dir=str(config.data.resolve()) if config.data else "",
        config=encode_config(shipped),
        brings_program=brings_program,
        code=digests.get("code", ""),
        data=digests.get("data", ""),
    )
