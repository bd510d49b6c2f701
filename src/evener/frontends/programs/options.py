"""The options of `evener run`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from msgspec import Meta, field

from evener.config.options import NodesConfig
from evener.config.run_config import LAYER_STRATEGIES, STRATEGIES
from evener.launch.nodes import relative_shares
from evener.oracle.division.layout import Replica
from evener.oracle.division.plan import Arrangement
from evener.oracle.division.rules import division_of
from evener.records.errors import InvalidInput, require_one_of


class ScriptConfig(NodesConfig, frozen=True, kw_only=True):
    """Nodes, division and arguments of a user's program; sent to every rank.

    Raises:
        InvalidInput: a value is not allowed.
    """

    script: Annotated[Path, Meta(description="Your program; other arguments are passed to it.")]
    strategy: Annotated[
        str,
        Meta(
            description="auto or data: nodes divide batches; filter, channel, hybrid, sharded or spatial: the layers "
            "of models."
        ),
    ] = "auto"
    shares: Annotated[str, Meta(description="measured, equal, or relative shares such as 7,2,1.")] = "measured"
    approximate: Annotated[
        bool, Meta(description="Train even if the result differs from one process; Evener then warns.")
    ] = False
    run_folder: Annotated[Path | None, Meta(description="Folder of record and plan; runs/SCRIPT-TIME by default.")] = (
        None
    )
    arguments: tuple[str, ...] = ()
    started: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        super().__post_init__()
        relative_shares(self.shares, self.num_local_nodes)
        require_one_of("--strategy", self.strategy, STRATEGIES)
        if self.strategy not in ("auto", "data", *LAYER_STRATEGIES):
            raise InvalidInput(
                f"--strategy {self.strategy} does not go with a program that calls loss.backward() itself, of which "
                f"nodes divide the batches (data) or the layers ({', '.join(LAYER_STRATEGIES)}): take one of these, or "
                f"make a Task of its model, loss and data, and start `evener train FILE --strategy {self.strategy}`"
            )

    def layers(self, size: int) -> Arrangement | None:
        """Return how `size` nodes divide layers: equally, or by the user's shares; None if they divide batches."""
        if size == 1 or self.strategy not in LAYER_STRATEGIES:
            return None
        shares = relative_shares(self.shares, size) or [1.0] * size
        return Arrangement(division=division_of(self.strategy), replicas=(Replica(shares=tuple(shares)),))

    @property
    def folder(self) -> Path:
        """The folder that the user named, or `runs/SCRIPT-TIME`."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self.started))
        return self.run_folder or Path("runs") / f"{self.script.stem}-{stamp}"
