"""How `--help` shows a command of many options: in groups, with lines to type."""

from __future__ import annotations

from typing import TypeAlias

Panels: TypeAlias = dict[str, tuple[str, ...]]
"""Names of fields by the heading above their options; what is in none comes first, under "Options"."""

_MASTER = "On a master's nodes"

TRAIN: Panels = {
    "What is trained": (
        "data", "option", "batch_size", "epochs", "precision", "seed", "accumulate", "compile",
        "workers", "trusted_only",
    ),
    "On which nodes": ("local_nodes", "devices", "memory", "patience", "elastic", "preflight"),
    "How the work is divided": (
        "strategy", "shares", "replicas", "columns", "members", "micro_batches", "schedule", "rematerialise", "plan",
        "stationary", "check",
    ),
    "What is written, read and shown": ("output", "dashboard", "quiet", "checkpoint", "checkpoint_every", "resume"),
    _MASTER: (
        "agreement", "staleness", "local_steps", "fraction", "outer_lr", "outer_momentum", "compress", "robust",
        "merge", "overlap", "skip_late", "ship_data",
        "system", "home", "master", "token", "token_file",
    ),
}  # fmt: skip
TUNE: Panels = {
    "What is tried": ("trials", "vary", "metric", "prune", "sampler", "ahead", "hours"),
    "What a trial trains": ("data", "option", "batch_size", "epochs", "precision", "seed", "thin", "trusted_only"),
    "On which nodes": ("local_nodes", "devices", "memory", "patience", "preflight", "join"),
    "What is written, read and shown": ("output", "resume", "dashboard"),
}
PLAN: Panels = {
    "What would be trained": ("option", "batch_size", "optimizer", "precision", "strategy"),
    "On which machines": ("profile", "machines", "network", "devices", "learn"),
    "What is shown": ("why", "prices", "watts", "scale", "agreements", "save"),
}

EXAMPLES: dict[str, tuple[str, ...]] = {
    "train": (
        "evener train digits --local-nodes 1.0,0.5",
        "torchrun --nproc-per-node 2 -m evener train my_task.py --option width=64 --epochs 10",
        "evener train my_task.py --agreement average --local-nodes 1.0,0.5 --local-steps 50",
        "evener train yolov8n.pt --data my-data.yaml --epochs 100 --agreement average",
        "evener train my_task.py --resume --checkpoint runs/my_task-20260131-120000/checkpoints",
    ),
    "tune": (
        "evener tune my_task.py --trials 50 --vary lr=1e-4..1e-1:log --vary width=64,128,256",
        "evener tune digits --trials 12 --vary channels=8..64:log --local-nodes 1,0.5,0.25",
        "evener tune yolov8n.pt --data coco8.yaml --trials 20 --epochs 30 --local-nodes 1,0.5",
    ),
    "yolo": (
        "evener yolo detect train model=yolov8n.pt data=coco8.yaml epochs=100 imgsz=640",
        "evener yolo train model=yolov8n-seg.yaml data=my.yaml batch=16 --local-nodes 1,0.5",
        "evener yolo detect train model=best.pt data=my.yaml --master 192.168.1.20:7117 --token-file token",
    ),
    "plan": (
        "evener plan resnet152 --machines 4xv100-node --network infiniband",
        "evener plan my_task.py --profile cluster.json --save plan.json",
    ),
    "benchmark": ("evener benchmark --task my_task.py --output cluster.json",),
    "up": ("evener up --listen :7117", "evener up --ssh gpu1,me@gpu2 --ssh-join '~/venv/bin/evener join --data /data'"),
    "join": ("evener join 192.168.1.20:7117 --token-file token --name attic",),
    "invite": ("evener invite", "evener invite --nodes 5 --hours 2", "evener invite --submitter alice"),
    "stop": ("evener stop", "evener stop --master 192.168.1.20:7117 --token-file token"),
    "doctor": (
        "evener doctor",
        "evener doctor --task my_task.py",
        "evener doctor --master 192.168.1.20:7117 --token-file token --task my_task.py",
    ),
    "dashboard": ("evener dashboard runs",),
    "report": ("evener report runs/*/record.json --output report.html",),
}
"""Lines to type, by command."""


def epilog(command: str) -> str | None:
    """Return the examples below the options of `command`; None if there are none."""
    lines = EXAMPLES.get(command, ())
    return "Such as:\n\n" + "\n\n".join(lines) if lines else None
