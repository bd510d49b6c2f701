"""Where the images are on this machine, of a description of data that was written on another one."""

from __future__ import annotations

from pathlib import Path

import yaml

from evener.records.errors import InvalidInput


def described_here(folder: Path, name: str, own: Path) -> Path:
    """The description of data for Ultralytics: that in `folder`, or a copy in `own` that says where images are here.

    What it says of their place holds if there is such a folder: as it is, or seen from the description. Else they lie
    beside the description, as where that was sent with them.

    Raises:
        InvalidInput: it cannot be read.
    """
    file = folder / name
    try:
        found = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidInput(f"{file} cannot be read as a description of data: {error}") from error
    said = found.get("path") if isinstance(found, dict) else None
    if said is None or (Path(said).is_absolute() and Path(said).is_dir()):
        return file
    place = folder / said
    copy = own / f"here-{file.stem}.yaml"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(yaml.safe_dump(found | {"path": str(place if place.is_dir() else folder)}))
    return copy
