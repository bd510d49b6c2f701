"""What it costs to hold a small step of the nodes against one process before the first one.

    python benchmarks/self_check.py [--nodes 1.0,0.5] [--strategies data,sharded,pipeline] [--json]

Each task takes one epoch of a few steps: `digits`; a ResNet-50 on images of 64 x 64; a Transformer encoder of 6 layers
on sequences of 64 tokens. Seconds are those that the check took, by the leader's clock; `off` is the largest difference
found, relative to the size of what differs.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product
from pathlib import Path

import msgspec
from results import open_results, parser_of

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from evener.commands.train import perform
from evener.config.run_config import RunConfig
from evener.records.errors import EvenerError, require
from evener.records.plan import Plan
from evener.records.schema import read_noun

TASKS = {"digits": "digits", "resnet50": "self_check_task.py", "transformer": "self_check_task.py"}


ROW = "{task:12} {strategy:10} {samples:9} {precisions:12} {seconds:8.2f} {off:9.1e}"


def main() -> None:
    """Every task once a strategy, and what was checked."""
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", default="1.0,0.5")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--strategies", default="data,sharded,pipeline")
    words = parser.parse_args()
    with open_results(words) as results:
        for name in words.tasks.split(","):
            require(name in TASKS, "--tasks", name, "of " + ", ".join(TASKS))
        results.say(f"{'task':12} {'strategy':10} {'samples':9} {'precisions':12} {'seconds':>8} {'off':>9}")
        for name, strategy in product(words.tasks.split(","), words.strategies.split(",")):
            results.add(ROW, **cell(name, strategy, words.nodes))


def cell(name: str, strategy: str, nodes: str) -> dict[str, object]:
    """What the check of one run took."""
    file = TASKS[name] if name == "digits" else str(Path(__file__).parent / TASKS[name])
    option = {} if name == "digits" else {"network": name}
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            task=file, option=option, strategy=strategy, local_nodes=nodes, epochs=1, output=Path(folder) / "run"
        )
        perform(config, to_stderr=True)
        check = read_noun(config.folder / "plan.json", Plan).check
    if check is None:
        raise EvenerError(f"{name} under {strategy} was not checked")
    return {
        **msgspec.structs.asdict(check),
        "task": name,
        "strategy": strategy,
        "samples": "+".join(map(str, check.samples)),
        "precisions": " ".join(check.precisions),
    }


if __name__ == "__main__":
    main()
