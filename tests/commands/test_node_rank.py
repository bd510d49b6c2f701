"""A rank on a node takes options from the submitter of its run; paths and processes are the machine's own."""

from __future__ import annotations

from pathlib import Path

import msgspec

from evener.commands.node_rank import _config_of
from evener.config.run_config import RunConfig
from evener.ps.node.rank_child import RankTask
from evener.ps.protocol.rank_messages import RankPlace
from evener.system.cores import usable_cores


def test_submitter_chooses_no_folder_and_few_processes_of_a_node(tmp_path: Path) -> None:
    theirs = Path("/home/user")
    wanted = RunConfig(task="digits", epochs=7, batch_size=5, workers=1024, plan=theirs / "plan.json")
    paths = dict.fromkeys(("checkpoint", "output", "data"), theirs)
    wanted = msgspec.structs.replace(wanted, **paths)
    task = RankTask(
        run="r",
        config=msgspec.json.encode(wanted, enc_hook=str),
        task="digits",
        data=None,
        folder=str(tmp_path),
        towards="",
        place=RankPlace(rank=0, nodes=(), secret=b"", patience=1.0, is_late=False),
        process=1,
        resumes=True,
        brings_program=False,
    )
    config = _config_of(task)
    assert (config.epochs, config.batch_size, config.output, config.resume) == (7, 5, tmp_path, True)
    assert config.workers <= 4 * usable_cores()
    assert str(theirs) not in str(msgspec.structs.asdict(config))
