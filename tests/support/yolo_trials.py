"""Attempts of one trial of a search for settings of Ultralytics, without the search; all numbers in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load, save
from torch import nn

from evener.frontends.yolo.overrides import YoloConfig
from evener.frontends.yolo.searched_trial import LocalTrial, TrialConfig
from evener.launch.nodes import NodeSpec
from evener.launch.processes import LocalProcesses
from evener.launch.rank_environment import RankEnvironment
from evener.records.errors import EvenerError
from evener.records.events import decode_events
from evener.records.plan import Plan
from evener.records.record import Epoch, Step
from evener.search.torch_trial import TorchTrial
from support.yolo_trainers import exact

_FINAL = "final.safetensors"


def _named(prefix: str, module: nn.Module) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor.clone() for name, tensor in module.state_dict().items()}


def exact_trial_rank(env: RankEnvironment, config: TrialConfig) -> None:
    """A rank of a trial, which computes in float64, and does not validate."""
    import torchvision_operators  # noqa: F401
    from evener.frontends.yolo.rank import yolo_rank
    from evener.frontends.yolo.settings import YoloTraining, quiet_ultralytics, read_training

    def read(training: YoloConfig) -> YoloTraining:
        described = read_training(training.overrides)
        torch.set_default_dtype(torch.float64)
        base: Any = exact(described.model._smart_load("trainer"), 0.0, env.rank)

        class Kept(base):  # type: ignore[misc]
            def final_eval(self) -> None:
                if self.trainer_rank.leads:
                    found = {**_named("model.", self.model.module), **_named("average.", self.ema.ema)}
                    (Path(self.save_dir) / _FINAL).write_bytes(save(found))

        return described._replace(trainer=Kept)

    with quiet_ultralytics():
        yolo_rank(env, config.training, read=read, trial=LocalTrial(config.state))


class Attempts:
    """Attempts of one trial on nodes.

    Attributes:
        losses: of every epoch that was reported, from 0.
    """

    def __init__(self, processes: LocalProcesses, settings: Sequence[str], folder: Path) -> None:
        self._processes, self._settings, self._folder = processes, settings, folder
        self.losses: dict[int, float | None] = {}
        (folder / "checkpoints").mkdir(parents=True)

    def run(
        self,
        nodes: Sequence[NodeSpec],
        *,
        until: int | None = None,
        step: int | None = None,
        stops_early: bool = False,
        shares: Sequence[int] = (),
    ) -> list[EvenerError | None]:
        """Go on to the end, until the end of an epoch (from 0), or until a stop after this step or before the first.

        Returns:
            The errors of the ranks.
        """
        overrides = ("train", *self._settings, f"save_dir={self._folder}", "exist_ok=True")
        training = YoloConfig(overrides=overrides, elastic=False, patience=30.0)
        samples = {node.name: share for node, share in zip(nodes, shares, strict=False) if share}
        config = TrialConfig(training, self._folder / "checkpoints" / "trainer.state", samples)
        trial = TorchTrial(self._processes, nodes, config.among([node.name for node in nodes]), exact_trial_rank)
        while not all(one.has_ended and one.is_drained for one in trial.processes):
            for _, data in self._processes.receive(0.2):
                for event in decode_events(data):
                    if isinstance(event, Plan if stops_early else Step) and getattr(event, "step", step) == step:
                        trial.stop()
                    if isinstance(event, Epoch):
                        self.losses[event.epoch] = event.loss
                        trial.answer(event, event.epoch == until)
        errors = [None if one.has_finished else trial.error() for one in trial.processes]
        trial.close()
        return errors

    def weights(self) -> dict[str, torch.Tensor]:
        """Weights and averages at the end of the trial."""
        return load((self._folder / _FINAL).read_bytes())

    def batch(self) -> int:
        """The last batch of the state that was kept, from 1."""
        data = (self._folder / "checkpoints" / "trainer.state").read_bytes()
        length = int.from_bytes(data[:8], "little")
        return int(msgspec.msgpack.decode(data[8 : 8 + length])["batch"])

    def lines(self) -> list[str]:
        """First columns of the file of results."""
        return [line.split(",")[0] for line in (self._folder / "results.csv").read_text().splitlines()]
