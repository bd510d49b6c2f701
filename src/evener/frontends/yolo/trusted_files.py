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


def what_runs(words: Mapping[str, str]) -> list[str]:
    """Which settings name files that are run, in words; a name of Ultralytics' own that is no file here is not one.

    Args:
        words: settings by name.
    """
    pickles = [f"{key}={words[key]}" for key in _MODELS if _is_file(words.get(key, ""), _PICKLES)]
    return [*pickles, *what_is_evaluated(words)]


def what_is_evaluated(words: Mapping[str, str]) -> list[str]:
    """Those of them that are no pickles."""
    found = []
    if _is_file(words.get("model", ""), _YAML) and "activation" in _content(words["model"]):
        found.append(f"`activation:` in model={words['model']}")
    if _is_file(words.get("data", ""), _YAML):
        download = _content(words["data"]).get("download")
        if download and not (isinstance(download, str) and _ARCHIVE.fullmatch(download.strip())):
            found.append(f"`download:` in data={words['data']}")
    if words.get("cfg", "").lower() not in ("", "none"):
        found.append(f"cfg={words['cfg']}, which may name others")
    return found


def warning_of(words: Mapping[str, str]) -> str:
    """What to tell the user of files that are run; empty if there are none."""
    found = what_runs(words)
    if not found:
        return ""
    verb = "runs" if len(found) == 1 else "run"
    return (
        f"warning: {', '.join(found)} {verb} as a program when Ultralytics loads it: "
        "use files of people whom you trust, or say --trusted-only"
    )


def refuse_programs(words: Mapping[str, str]) -> None:
    """Have nothing run that came with a file, from now on in this process and those that it starts.

    Args:
        words: settings by name.

    Raises:
        InvalidInput: a file cannot be loaded without; names it.
    """
    found = what_is_evaluated(words)
    if not found and (pickles := what_runs(words)) and not _loads_safely():
        found = pickles
    if found:
        raise InvalidInput(f"--trusted-only: {', '.join(found)} would run as a program; leave it out")
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
    return Path(value).suffix.lower() in suffixes and (Path(value).is_file() or "://" in value)


def _content(value: str) -> dict[str, object]:
    """Of a file; empty where it cannot be read, or is no settings, which Ultralytics says itself."""
    try:
        found = yaml.safe_load(Path(value).read_text(encoding="utf-8", errors="replace"))
    except (OSError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
