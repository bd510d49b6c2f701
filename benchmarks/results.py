"""What a benchmark finds: rows that people read as they come or, with `--json`, one JSON document at the end.

    words = parser_of(__doc__).parse_args()
    with open_results(words) as results:
        results.add("{way:8} {seconds:6.2f} s", way="bare", seconds=1.25, rounds=5)

    {"benchmark": "wire", "machine": {"cpu": ..., "cores": 2, "python": ...}, "options": {...}, "rows": [{...}, ...]}

A row is shown by its format, which need not show all of it; the document holds all of it, in the units that its names
state. With `--json` stdout holds the document alone, and what people read goes to stderr.
"""

from __future__ import annotations

import argparse
import os
import platform
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from evener.records.errors import EvenerError
from evener.system.host import cpu_model, package_versions


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with `--json`, whose help is a benchmark's docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document; what people read goes to stderr")
    return parser


def machine() -> dict[str, object]:
    """What this is measured on, and with which versions. PyTorch is asked for GPUs only where it is loaded already."""
    torch = sys.modules.get("torch")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch else []
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "gpus": gpus,
        "os": platform.platform(),
        "openssl": ssl.OPENSSL_VERSION,
        **package_versions(),
    }


class Results:
    """Rows of plain values.

    Args:
        options: of the benchmark, `json` among them.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        """Something for people alone."""
        print(text, file=sys.stderr if self.options.json else sys.stdout, flush=True)

    def add(self, form: str, /, **row: Any) -> None:
        """Keep `row`, and show it by the format `form`."""
        self.rows.append(row)
        self.say(form.format(**row))

    def document(self) -> bytes:
        """All of it as JSON; numbers that are not finite are null."""
        options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(self.options).items()}
        name = Path(sys.argv[0]).stem
        found = {"benchmark": name, "machine": machine(), "options": options, "rows": self.rows}
        return msgspec.json.format(msgspec.json.encode(found), indent=1)


@contextmanager
def open_results(options: argparse.Namespace) -> Iterator[Results]:
    """Results that begin with the machine and versions and end as `options` say; a user's mistake is a sentence."""
    results, facts = Results(options), machine()
    cores = f"{facts.pop('cpu')}, {facts.pop('cores')} cores, "
    results.say(cores + ", ".join(f"{name} {value}" for name, value in facts.items() if value))
    try:
        yield results
    except EvenerError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    if options.json:
        sys.stdout.write(results.document().decode() + "\n")
