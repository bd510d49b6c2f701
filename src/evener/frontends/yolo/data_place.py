"""Where the images are on this machine, of a description of data that was written on another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from evener.records.errors import InvalidInput

_WHOLE = "."
"""Name of data that are a folder, without a description."""
SENT_IMAGES = "sent_images"
"""Key of the folder of images among the settings that nodes receive together with the data: relative to the folder of
the description.
"""
_PARTS = ("train", "val", "test")


def place_of(data: str) -> tuple[str, Path | None]:
    """Return (name, folder) of the data of this machine for other nodes: see `described_here`.

    Args:
        data: path of a description, of a folder with one, or of a folder with one folder of images for each class. Any
            other name is one that Ultralytics knows, and has no folder.
    """
    path = Path(data)
    if path.is_dir() and data:
        files = [file for file in path.glob("*.yaml") if _describes_images(file)]
        return files[0].name if len(files) == 1 else _WHOLE, path.resolve()
    return (path.name, path.resolve().parent) if path.is_file() else (data, None)


def sent_images(data: str) -> str:
    """Return where the images are within the folder of a description of this machine, which is sent as a whole.

    Args:
        data: as for `place_of`.

    Raises:
        InvalidInput: images are elsewhere, where the nodes have none, or others.
    """
    name, folder = place_of(data)
    if folder is None or name == _WHOLE:
        return _WHOLE
    description = _read(folder / name)
    place = (folder / str(description.get("path") or _WHOLE)).resolve()
    if not place.is_dir():
        place = folder
    if not place.is_relative_to(folder):
        raise InvalidInput(
            f"{folder / name} says that its images are in {place}, and {folder} is sent: move the file to the images"
        )
    for part in _PARTS:
        for entry in _entries(place, description.get(part)):
            if Path(entry).is_absolute():
                raise InvalidInput(
                    f"{folder / name} names {entry}, which the nodes do not have: write {part}: relative to path:"
                )
    return str(place.relative_to(folder))


def described_here(folder: Path, name: str, scratch: Path, images: str | None = None) -> Path:
    """Return the description of data: the file in `folder`, or a copy in `scratch` with the images' folder here.

    Data without a description are the `folder` itself.

    The `path:` of the description is used if it is a folder here, absolute or relative to the description. Otherwise
    the images are beside the description. Data that were sent are never looked for elsewhere.

    Args:
        folder: folder of the description.
        name: its name.
        scratch: folder for a copy.
        images: from `sent_images` if the data were sent.

    Raises:
        InvalidInput: it cannot be read.
    """
    if name == _WHOLE:
        return folder
    file = folder / name
    description = _read(file)
    said = description.get("path")
    if images is None and (said is None or (Path(said).is_absolute() and Path(said).is_dir())):
        return file
    place = folder / (images if images is not None else str(said))
    copy = scratch / f"here-{file.stem}.yaml"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(yaml.safe_dump(description | {"path": str(place if place.is_dir() else folder)}))
    return copy


def _describes_images(file: Path) -> bool:
    try:
        return {"train", "names"} <= _read(file).keys()
    except InvalidInput:
        return False


def _read(file: Path) -> dict[str, Any]:
    """Return a description; empty if it is no mapping. Raises InvalidInput."""
    try:
        description = yaml.safe_load(file.read_text())
    except FileNotFoundError as error:
        raise InvalidInput(
            f"there is no {file}: the data have to be on every node, or are sent with --ship-data"
        ) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidInput(f"{file} cannot be read as a description of data: {error}") from error
    return description if isinstance(description, dict) else {}


def _entries(folder: Path, said: Any) -> list[str]:
    """Return the paths that a part of a description names, and the first line of each list of images among them."""
    entries = [str(one) for one in (said if isinstance(said, list) else [said] if said else [])]
    lists = [folder / entry for entry in entries if entry.endswith(".txt")]
    first_lines = [file.read_text().partition("\n")[0].strip() for file in lists if file.is_file()]
    return entries + first_lines
