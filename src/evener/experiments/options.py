"""The options of the experiments, field by field."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from evener.records.errors import require
from evener.records.schema import Part


class AbciConfig(Part, frozen=True, kw_only=True):
    """The configuration of `evener experiment oracle-abci`."""

    csv: Annotated[Path, Meta(description="File to write.")] = Path("oracle-abci.csv")


class NfnnConfig(Part, frozen=True, kw_only=True):
    """The configuration of `evener experiment nfnn`. Raises InvalidValue if a value is not allowed."""

    data: Annotated[Path | None, Meta(description="Folder of MNIST's IDX files; data/mnist by default.")] = None
    updates: Annotated[int, Meta(description="Updates of the common weights in every run.")] = 5000
    workers: Annotated[str, Meta(description="Numbers of workers, such as 1,2,3.")] = "1,2,3"
    mode: Annotated[str, Meta(description="sync, async or sync,async.")] = "sync,async"
    repeat: Annotated[int, Meta(description="Runs of every cell.")] = 5
    tls: Annotated[bool, Meta(description="Encrypt as between machines, which loopback does not need.")] = False
    seed: Annotated[
        int, Meta(description="Seed of the weights, and of the first run's order; 9 is nearest to the published.")
    ] = 9
    output: Annotated[Path, Meta(description="Folder of table and figure.")] = Path("nfnn")

    def __post_init__(self) -> None:
        numbers("--workers", self.workers)
        require(
            sorted(self.modes) in (["sync"], ["async"], ["async", "sync"]),
            "--mode",
            self.mode,
            "sync, async or sync,async",
        )
        require(self.updates > 0, "--updates", self.updates, "positive")
        require(self.repeat > 0, "--repeat", self.repeat, "positive")
        require(self.seed >= 0, "--seed", self.seed, "0 or more")
        _require_folder(self.output)

    @property
    def modes(self) -> list[str]:
        """The modes in the order in which they run."""
        return [item.strip() for item in self.mode.split(",")]


class StrategiesConfig(Part, frozen=True, kw_only=True):
    """The configuration of `evener experiment resnet152-strategies`. Raises InvalidValue if a value is not allowed."""

    ranks: Annotated[str | None, Meta(description="Numbers of ranks; 1,2 by default.")] = None
    batch_size: Annotated[str | None, Meta(description="Samples of a step, such as 16,64; 8 by default.")] = None
    chunks: Annotated[str | None, Meta(description="Micro-batches of pipelines, such as 2,8; 4 by default.")] = None
    strategies: Annotated[
        str,
        Meta(description="As in `evener train --strategy`, such as data,sharded. Default: all single divisions."),
    ] = "data,spatial,filter,channel,hybrid,sharded,pipeline"
    steps: Annotated[int | None, Meta(description="Timed steps of every cell; 2 by default.")] = None
    size: Annotated[int, Meta(description="Rows and columns of an image.")] = 64
    full: Annotated[bool, Meta(description="The published sizes, for a machine with 8 GPUs.")] = False
    output: Annotated[Path, Meta(description="Folder of table and curves.")] = Path("resnet152-strategies")

    def __post_init__(self) -> None:
        for option, text in (("--ranks", self.ranks), ("--batch-size", self.batch_size), ("--chunks", self.chunks)):
            numbers(option, text or "1")
        require(self.steps is None or self.steps > 0, "--steps", self.steps, "positive")
        require(self.size > 0, "--size", self.size, "positive")
        _require_folder(self.output)


class GpipeConfig(Part, frozen=True, kw_only=True):
    """The configuration of `evener experiment gpipe`. Raises InvalidValue if a value is not allowed."""

    table: Annotated[str, Meta(description="Tables of the paper: some of 1,2,3.")] = "1,2,3"
    stages: Annotated[str | None, Meta(description="Numbers of stages; 2,4 by default.")] = None
    micro_batches: Annotated[str, Meta(description="Numbers of micro-batches in table 2.")] = "1,4,32"
    steps: Annotated[int, Meta(description="Timed steps for every number.")] = 2
    full: Annotated[bool, Meta(description="The paper's models and memory, on 8 GPUs.")] = False
    planned: Annotated[
        bool, Meta(description="Table 1 from the division alone: nothing is trained, and no GPU is needed.")
    ] = False
    output: Annotated[Path, Meta(description="Folder of the tables.")] = Path("gpipe")

    def __post_init__(self) -> None:
        require(max(numbers("--table", self.table)) <= 3, "--table", self.table, "some of 1,2,3")
        numbers("--stages", self.stages or "1")
        numbers("--micro-batches", self.micro_batches)
        require(self.steps > 0, "--steps", self.steps, "positive")
        require(
            not self.planned or self.table == "1", "--table", self.table, "1 with --planned: the others need timing"
        )
        _require_folder(self.output)


class ScatteredConfig(Part, frozen=True, kw_only=True):
    """The configuration of `evener experiment scattered-gpus`. Raises InvalidValue if a value is not allowed."""

    data: Annotated[Path, Meta(description="Description of a data set, as Ultralytics reads it.")]
    model: Annotated[str, Meta(description="Model of Ultralytics.")] = "yolov8n.yaml"
    nodes: Annotated[str, Meta(description="Speeds of local nodes; of several runs, with semicolons.")] = "1,1;1,0.5"
    batch_size: Annotated[int, Meta(description="Images of a step.")] = 16
    imgsz: Annotated[int, Meta(description="Rows and columns of an image.")] = 640
    epochs: Annotated[int, Meta(description="Epochs of every run; the first one does not count.")] = 4
    seed: Annotated[int, Meta(description="Seed of weights, order and transforms.")] = 0
    output: Annotated[Path, Meta(description="Folder of table, picture, page and runs.")] = Path("scattered-gpus")

    def __post_init__(self) -> None:
        require(self.data.is_file(), "DATA", str(self.data), "a file, such as my-data.yaml")
        for name, value in (("--batch-size", self.batch_size), ("--imgsz", self.imgsz), ("--epochs", self.epochs)):
            require(value > 0, name, value, "positive")
        _require_folder(self.output)


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Return different positive numbers such as 1,2,4, in order. Raises InvalidValue."""
    values = [int(item) if item.strip().isdecimal() else 0 for item in text.split(",")]
    is_allowed = all(values) and len(set(values)) == len(values)
    require(is_allowed, option, text, "different positive numbers such as 1,2,4")
    return tuple(sorted(values))


def _require_folder(output: Path) -> None:
    require(output.is_dir() or not output.exists(), "--output", str(output), "a folder")
