"""The version of Evener, and how to install more of it."""

import re
import sys
from pathlib import Path

VERSION = "0.1.0"
_CHECKOUT = Path(__file__).parents[3]


def pip_install(extra: str) -> str:
    """The command that installs an optional part of Evener, an extra of pyproject.toml, the way Evener came here.

    No package index has Evener yet: it comes from a checkout, or from a repository, by pip, pipx or uv.
    """
    if (_CHECKOUT / "pyproject.toml").is_file():
        return f"pip install -e '{_CHECKOUT}[{extra}]'"
    if not (source := _source()):
        return f"pip install '.[{extra}]', in a checkout of Evener"
    command, extras = "pip install", {extra}
    for receipt, other in (("uv-receipt.toml", "uv tool install"), ("pipx_metadata.json", "pipx install --force")):
        if (file := Path(sys.prefix, receipt)).is_file():
            command, extras = other, {extra, *_extras(file.read_text())}  # these tools keep no earlier extras
    requirement = f"evener[{','.join(sorted(extras))}] @ {source}"
    return f"{command} '{requirement}'"


def _extras(receipt: str) -> list[str]:
    """Return the extras that a tool's receipt names: as a list of `extras`, or in the brackets of a requirement."""
    match = re.search(r'extras = \[([^\]]*)\]|"evener\[([^\]]*)\]', receipt)
    return re.findall(r"[\w-]+", match[1] or match[2]) if match else []


def _source() -> str:
    """Return where the installed Evener came from, as pip takes it; empty if that is unknown."""
    import json  # every process imports this module, and few install
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        text = distribution("evener").read_text("direct_url.json")  # of PEP 610
    except PackageNotFoundError:
        return ""
    known = json.loads(text) if text else {}
    url, source = known.get("url", ""), known.get("vcs_info")
    return f"{source['vcs']}+{url}@{source['commit_id']}" if source else url
