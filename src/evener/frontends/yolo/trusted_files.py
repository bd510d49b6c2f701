"""Files whose code Ultralytics runs when it loads them, and their refusal.

    model.pt              a pickle: loading it may run whatever its author wanted
    model.yaml            `activation:` is evaluated as Python
    data.yaml             `download:` is run as Python, or by a shell, where the images are missing

Evener warns of such files once. `--trusted-only` refuses them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from evener.records.errors import InvalidInput

SAFE_LOAD = "ULTRALYTICS_SAFE_LOAD"
"""Environment variable by which Ultralytics (8.4 and later) loads known classes of a .pt alone."""
_PICKLES = (".pt", ".pth")
_MODELS = ("model", "resume", "pretrained")
_ARCHIVE = re.compile(r"https?://[^\s'\"]+")
_YAML = (".yaml", ".yml")
_SCALE, _SCALE_P6 = re.compile(r"(\d+)[nslmx](.+)?$"), re.compile(r"(\d+[nslmx])6(.+)?$")


def what_runs(settings: Mapping[str, str]) -> list[str]:
    """Describe the settings that name files which run as programs; names of Ultralytics' own models do not count.

    Args:
        settings: by name.
    """
    pickles = [f"{key}={settings[key]}" for key in _MODELS if _is_file(settings.get(key, ""), _PICKLES)]
    return [*pickles, *what_is_evaluated(settings)]


def what_is_evaluated(settings: Mapping[str, str]) -> list[str]:
    """Describe the settings of `what_runs` that are no pickles."""
    names = [
        f"{key}={settings[key]}, which comes from another machine,"
        for key, suffixes in (("model", _YAML), ("data", None))
        if _is_remote(settings.get(key, ""), suffixes)
    ]
    if any("activation" in _content(file) for file in _model_files(settings.get("model", ""))):
        names.append(f"`activation:` in model={settings['model']}")
    if _is_file(settings.get("data", ""), _YAML):
        download = _content(settings["data"]).get("download")
        if download and not (isinstance(download, str) and _ARCHIVE.fullmatch(download.strip())):
            names.append(f"`download:` in data={settings['data']}")
    if settings.get("cfg", "").lower() not in ("", "none"):
        names.append(f"cfg={settings['cfg']}, which may name others")
    return names


def warning_of(settings: Mapping[str, str]) -> str:
    """Return the warning about files that run as programs; empty if there are none."""
    names = what_runs(settings)
    if not names:
        return ""
    verb = "runs" if len(names) == 1 else "run"
    return (
        f"warning: {', '.join(names)} {verb} as a program when Ultralytics loads it: "
        "use files of people whom you trust, or say --trusted-only"
    )


def refuse_programs(settings: Mapping[str, str]) -> None:
    """Have nothing run that came with a file, from now on in this process and those that it starts.

    Args:
        settings: by name.

    Raises:
        InvalidInput: a file cannot be loaded without; names it.
    """
    names = what_is_evaluated(settings)
    if not names and (pickles := what_runs(settings)) and not _loads_safely():
        names = pickles
    if names:
        raise InvalidInput(f"--trusted-only: {', '.join(names)} would run as a program; leave it out")
    os.environ[SAFE_LOAD] = "1"


def _loads_safely() -> bool:
    """Whether the Ultralytics that is installed can load known classes alone."""
    os.environ[SAFE_LOAD] = "1"  # which it reads when it is imported
    try:
        from ultralytics.nn import tasks
    except ImportError:
        return False
    safe: Any = getattr(tasks, "_SafeLoad", None)
    return safe is not None and bool(safe.SUPPORTED and safe.restricted())


def _is_file(value: str, suffixes: tuple[str, ...]) -> bool:
    path = Path(_without_query(value))
    return path.suffix.lower() in suffixes and (path.is_file() or "://" in value)


def _is_remote(value: str, suffixes: tuple[str, ...] | None) -> bool:
    """Whether Ultralytics downloads this file, and its name ends so; None for any name."""
    return "://" in value and (suffixes is None or Path(_without_query(value)).suffix.lower() in suffixes)


def _model_files(value: str) -> list[str]:
    """Return the descriptions of models that Ultralytics may read for `value`: for yolo8n.yaml also yolo8.yaml."""
    named = (value.strip(), _SCALE_P6.sub(r"\1-p6\2", value.strip()))
    without_scale = (_SCALE.sub(r"\1\2", name) for name in named)
    return [one for one in dict.fromkeys((*named, *without_scale)) if _is_file(one, _YAML)]


def _without_query(value: str) -> str:
    """Return a path or an address as Ultralytics takes it."""
    return value.strip().partition("?")[0] if "://" in value else value.strip()


def _content(value: str) -> dict[str, object]:
    """Return the settings of a file; empty if it cannot be read or holds none, which Ultralytics reports itself."""
    try:
        content = yaml.safe_load(Path(value.strip()).read_text(encoding="utf-8", errors="replace"))
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
