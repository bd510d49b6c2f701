"""The version of Evener, and how to install more of it."""

from pathlib import Path

VERSION = "0.1.0"
_CHECKOUT = Path(__file__).parents[3]


def pip_install(extra: str) -> str:
    """The command that installs an optional part of Evener, an extra of pyproject.toml.

    No package index has Evener yet, so it is installed from its checkout.
    """
    if (_CHECKOUT / "pyproject.toml").is_file():
        return f"pip install -e '{_CHECKOUT}[{extra}]'"
    return f"pip install '.[{extra}]', in a checkout of Evener"
