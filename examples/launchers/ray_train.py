"""Evener in a cluster of Ray's: Ray Train places a worker on each machine, each is a rank of `evener train`.

    pip install -e '.[ray]'
    python examples/launchers/ray_train.py --workers 2 digits --epochs 2

Ray finds the machines, starts the workers and says which is the first; Evener measures them and divides the work
by what they are worth. The rank is a process of its own below Ray's worker, and ends with it.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray.train
import torch.distributed
from ray.train.torch import TorchConfig, TorchTrainer


def be_a_rank(config: dict[str, Any]) -> None:
    """What every worker does; Ray has set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_ADDR for it."""
    is_first = ray.train.get_context().get_world_rank() == 0
    told = [{"MASTER_PORT": free_port(), "EVENER_SECRET": secrets.token_hex(16)} if is_first else {}]
    torch.distributed.broadcast_object_list(told)  # over the group that Ray made, so that the secret stays among them
    words = [sys.executable, "-m", "evener", "train", *config["words"], "--output", config["output"]]
    subprocess.run(words, env={**os.environ, **told[0]}, check=True)
    if is_first:
        record = json.loads(Path(config["output"], "record.json").read_text())
        metrics = {name: record[name] for name in ("validation_accuracy", "samples_per_second")}
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(config["output"]))
    else:
        ray.train.report({})


def free_port() -> str:
    with socket.create_server(("", 0)) as listener:
        return str(listener.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="evener train on the workers of Ray Train")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="a GPU for every worker")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/ray"), help="of the run, on the first worker's machine"
    )
    parser.add_argument(
        "--storage", type=Path, default=Path("runs/ray-storage"), help="of Ray, reached by all machines"
    )
    known, words = parser.parse_known_args()
    trainer = TorchTrainer(
        be_a_rank,
        train_loop_config={"words": words, "output": str(known.output.resolve())},
        torch_config=TorchConfig(backend="gloo"),  # it carries two words
        scaling_config=ray.train.ScalingConfig(num_workers=known.workers, use_gpu=known.gpus),
        run_config=ray.train.RunConfig(storage_path=str(known.storage.resolve()), name=known.output.name),
    )
    result = trainer.fit()
    print(f"{result.metrics}, weights and record are in {result.checkpoint.path}")


if __name__ == "__main__":
    main()
