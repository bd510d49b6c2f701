"""Every name of Ultralytics that Evener uses. A version that has them otherwise fails here, and nowhere else first."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

from support.yolo_cases import needs_ultralytics

pytestmark = needs_ultralytics

ROOM = Path(__file__).parents[3] / "src" / "evener" / "frontends" / "yolo"
IMPORTED = {
    "ultralytics.cfg": ["CFG_INT_KEYS", "TASK2DATA", "get_cfg", "get_save_dir", "smart_value"],
    "ultralytics.engine.model": ["Model"],
    "ultralytics.engine.trainer": ["BaseTrainer"],
    "ultralytics.engine.tuner": ["Tuner"],
    "ultralytics.engine.validator": ["BaseValidator"],
    "ultralytics.models.yolo.classify.train": ["ClassificationTrainer"],
    "ultralytics.models.yolo.classify.val": ["ClassificationValidator"],
    "ultralytics.models.yolo.detect.train": ["DetectionTrainer"],
    "ultralytics.models.yolo.model": ["YOLO"],
    "ultralytics.models.yolo.obb.train": ["OBBTrainer"],
    "ultralytics.models.yolo.pose.train": ["PoseTrainer"],
    "ultralytics.models.yolo.segment.train": ["SegmentationTrainer"],
    "ultralytics.nn": ["tasks"],
    "ultralytics.nn.tasks": ["load_checkpoint"],
    "ultralytics.utils": ["RANK"],
    "ultralytics.utils.callbacks.base": ["get_default_callbacks"],
    "ultralytics.utils.metrics": [
        "ClassifyMetrics",
        "ConfusionMatrix",
        "DetMetrics",
        "OBBMetrics",
        "PoseMetrics",
        "SegmentMetrics",
    ],
    "ultralytics.utils.loss": ["E2EDetectLoss", "E2ELoss", "v8ClassificationLoss", "v8DetectionLoss"],
    "ultralytics.utils.plotting": ["plot_tune_results"],
    "ultralytics.utils.torch_utils": ["parse_device", "unwrap_model"],
}
"""By module: names that are imported."""
METHODS = {
    "ultralytics.engine.trainer:BaseTrainer": {
        "__init__": ["self", "cfg", "overrides", "_callbacks"],
        "_close_dataloader_mosaic": ["self"],
        "_do_train": ["self"],
        "_get_warmup_iterations": ["self", "num_batches"],
        "_handle_nan_recovery": ["self", "epoch"],
        "_setup_train": ["self"],
        "auto_batch": ["self", "max_num_obj", "dataset_size"],
        "build_dataset": ["self", "img_path", "mode", "batch"],
        "final_eval": ["self"],
        "get_dataloader": ["self", "dataset_path", "batch_size", "rank", "mode"],
        "get_dataset": ["self"],
        "get_model": ["self", "cfg", "weights", "verbose"],
        "get_validator": ["self"],
        "optimizer_step": ["self"],
        "plot_metrics": ["self"],
        "plot_training_labels": ["self"],
        "plot_training_samples": ["self", "batch", "ni"],
        "preprocess_batch": ["self", "batch"],
        "resume_training": ["self", "ckpt"],
        "run_callbacks": ["self", "event"],
        "save_metrics": ["self", "metrics"],
        "save_model": ["self"],
        "train": ["self"],
        "validate": ["self"],
    },
    "ultralytics.engine.tuner:Tuner": {"__init__": ["self", "args", "_callbacks", "model"]},
    "ultralytics.engine.validator:BaseValidator": {
        "gather_stats": ["self"],
        "init_metrics": ["self", "model"],
        "plot_predictions": ["self", "batch", "preds", "ni"],
        "plot_val_samples": ["self", "batch", "ni"],
        "update_metrics": ["self", "preds", "batch"],
    },
    "ultralytics.models.yolo.model:YOLO": {
        "__init__": ["self", "model", "task", "verbose"],
        "_reset_ckpt_args": ["args"],
        "_smart_load": ["self", "key"],
        "add_callback": ["self", "event", "func"],
        "train": ["self", "trainer", "kwargs"],
        "tune": ["self", "use_ray", "iterations", "args", "kwargs"],
    },
    "ultralytics.utils.metrics:DetMetrics": {"update_stats": ["self", "stat"]},
    "ultralytics.utils.loss:v8DetectionLoss": {"loss": ["self", "preds", "batch"]},
}
"""By class: methods that are called or overridden, with their parameters."""
WORDS = {
    "ultralytics.engine.model": [
        "self.ckpt = {}", "self.ckpt_path", "self.predictor = None", "self.metrics = ", '"train_metrics"',
        'kwargs.setdefault("optimizer", "AdamW")',
        "_callbacks=self.callbacks", 'if not args.get("resume") and self.ckpt:',
    ],
    "ultralytics.engine.trainer": [
        "self.stopper, self.stop", "self.stop |= ", "on_fit_epoch_end", "if self.batch_size < 1 and RANK == -1",
        "self.callbacks.get(event, [])", "on_pretrain_routine_start", "on_pretrain_routine_end", "on_train_start",
        "_oom_retries", "train_loader", "test_loader", "start_epoch", "best_fitness", "loss_items", "scaler",
        "self.amp",
        "train_time_start", "warmup_bias_lr", "warmup_momentum", "initial_lr", "self.lf", '"param_group": "bias"',
        "max_norm=10.0",
        "last_opt_step = -1", "if ni - last_opt_step >= self.accumulate", "np.interp(ni, xi, [1, acc0]).round()",
        "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end", "criterion", "self.ema.ema", "self.last",
        "self.csv.unlink()", "self.fitness",
        '"epoch": self.epoch', "self.last.write_bytes", "self.best.write_bytes",
    ],
    "ultralytics.engine.tuner": [
        "self.space = ", "self.tune_dir = ", '"tune_results.ndjson"', '"best_hyperparameters.yaml"', '"iteration"',
        '"fitness"', '"hyperparameters"', '"datasets"', '"save_dirs"', '"weights"',
    ],
    "ultralytics.utils.callbacks.base": ['if "Trainer" in instance.__class__.__name__'],
    "ultralytics.utils.callbacks.wb": ["trainer.args.resume and", "trainer.args.name"],
    "ultralytics.utils.callbacks.dvc": ["_training_epoch = True", "def on_train_epoch_start"],
    "ultralytics.utils.callbacks.tensorboard": ["on_pretrain_routine_start", "on_train_start"],
    "ultralytics.engine.validator": [
        "self.callbacks.get(event, [])", "confusion_matrix", "self.jdict", "self.seen", "self.dataloader", "args.plots",
    ],
    "ultralytics.models.yolo.classify.val": ["self.pred", "self.targets"],
    "ultralytics.models.yolo.detect.val": ["self.metrics.update_stats"],
    "ultralytics.data.augment": ["buffer_enabled", "pre_transform", "self.transforms"],
    "ultralytics.utils.loss": [
        "self.assigner", "self.one2many", "self.one2one", "self.rle_loss", "self.bcedice_loss", "self.loss_names",
        "self.updates",
        "hyp.rle", "hyp.box", "self.overlap", '"box_loss"', '"cls_loss"', '"dfl_loss"', '"l1_loss"', '"angle_loss"',
        '"seg_loss"', '"sem_loss"', '"pose_loss"', '"kobj_loss"', '"rle_loss"', '{"loss"',
    ],
    "ultralytics.data.base": [
        "len(self.buffer) >= self.max_buffer_length", "self.imgsz = imgsz", "self.channels = channels",
    ],
    "ultralytics.data.dataset": ["self.rect", "collate_fn"],
    "ultralytics.utils.torch_utils": ["m.module", "self.decay", "self.updates", 'x["epoch"] = -1'],
}  # fmt: skip
"""By module: attributes, events and parts of losses that its text has to speak of."""

PROGRAM = """
import importlib, inspect, json, pathlib, sys
import torchvision_operators
imported, methods, words = json.load(sys.stdin)
missing = []
for name, wanted in imported.items():
    module = importlib.import_module(name)
    missing += [f"{name}.{one}" for one in wanted if not hasattr(module, one)]
for name, wanted in methods.items():
    module, _, kind = name.partition(":")
    for method, parameters in wanted.items():
        found = getattr(getattr(importlib.import_module(module), kind), method, None)
        if found is None or list(inspect.signature(found).parameters) != parameters:
            missing.append(f"{name}.{method}({', '.join(parameters)})")
for name, wanted in words.items():
    text = pathlib.Path(importlib.import_module(name).__file__).read_text()
    missing += [f"{name}: {word}" for word in wanted if word not in text]
print(json.dumps(missing))
"""


def test_ultralytics_provides_every_name_that_evener_uses() -> None:
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([IMPORTED, METHODS, WORDS]),
        env={**os.environ, "PYTHONPATH": paths, "YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_yolo_package_imports_no_other_ultralytics_name() -> None:
    found: dict[str, set[str]] = {}
    for path in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ultralytics"):
                found.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
            assert not isinstance(node, ast.Import) or not any("ultralytics" in alias.name for alias in node.names)
    assert {name: sorted(names) for name, names in found.items()} == IMPORTED
