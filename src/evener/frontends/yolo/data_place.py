"""Where the images are on this machine, of a description of data that was written on another one."""

from __future__ import annotations

from pathlib import Path

import yaml

from evener.records.errors import InvalidInput

_WHOLE = "."
"""Name of data that are a folder, without a description."""


def place_of(data: str) -> tuple[str, Path | None]:
    """Return (name, folder) of the data of this machine for other nodes: see `described_here`.

    Args:
        data: path of a description, or of a folder with one folder of images for each class. Any other name is one
            that Ultralytics knows, and has no folder.
    """
    path = Path(data)
    if path.is_dir() and data:
        return _WHOLE, path.resolve()
    return (path.name, path.resolve().parent) if path.is_file() else (data, None)


def described_here(folder: Path, name: str, scratch: Path) -> Path:
    """Return the description of data: the file in `folder`, or a copy in `scratch` with the images' folder here.

    Data without a description are the `folder` itself.

    The `path:` of the description is used if it is a folder here, absolute or relative to the description. Otherwise
    the images are beside the description, as when both were sent.

    Raises:
        InvalidInput: it cannot be read.
    """
    if name == _WHOLE:
        return folder
    file = folder / name
    try:
        description = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidInput(f"{file} cannot be read as a description of data: {error}") from error
    said = description.get("path") if isinstance(description, dict) else None
    if said is None or (Path(said).is_absolute() and Path(said).is_dir()):
        return file
    place = folder / said
    copy = scratch / f"here-{file.stem}.yaml"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(yaml.safe_dump(description | {"path": str(place if place.is_dir() else folder)}))
    return copy
