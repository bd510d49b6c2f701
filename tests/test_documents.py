"""The documents say what the code says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from evener.parallel.parallel_model import ParallelModel
from evener.records.version import VERSION
from support.sentences import is_said, quoted

ROOT = Path(__file__).parents[1]


def test_room_drawing_matches_the_import_rules() -> None:
    checked = subprocess.run(
        [sys.executable, ROOT / "scripts" / "packages.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stderr


def test_readme_is_short_and_starts_with_five_lines_and_a_picture() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1000
    first_screen = text.splitlines()[:40]
    assert [number for number in "12345" if any(f"# {number}" in line for line in first_screen)] == list("12345")
    assert any(line.startswith("![") for line in first_screen)


def test_every_link_of_the_readme_leads_to_a_file() -> None:
    targets = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text())
    assert {"docs/two-pcs.md", "docs/yolo.md", "docs/strategies.md", "docs/parameter-server.md", "CONTRIBUTING.md"} <= {
        *targets
    }
    assert [one for one in targets if not one.startswith("http") and not (ROOT / one).exists()] == []


def test_install_commands_use_a_checkout_before_the_first_release() -> None:
    texts = [*(page for page in PAGES if page.name != "CHANGELOG.md"), *(ROOT / "src").rglob("*.py")]
    named = [f"{path.relative_to(ROOT)}: {found}" for path in texts for found in INSTALLED.findall(path.read_text())]
    assert named == []
    [typed] = re.findall(r"pip install .*'\.\[(.*)\]'", (ROOT / "README.md").read_text())
    assert "dashboard" in typed.split(",")


OUTSIDE_THE_SITE = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md")
"""Pages with links that mkdocs does not check."""


@pytest.mark.parametrize("page", OUTSIDE_THE_SITE)
def test_every_link_of_a_page_outside_the_site_leads_to_a_file(page: str) -> None:
    path = ROOT / page
    targets = re.findall(r"\]\(([^)#]+)", path.read_text())
    assert [one for one in targets if not one.startswith("http") and not (path.parent / one).exists()] == []


LAB = ROOT / "docs" / "lab"


def test_every_lab_figure_shows_the_numbers_of_its_table() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        figures = import_module("lab_figures").figures
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    found = [figure for page in LAB.glob("*.md") for figure in figures(page.read_text())]
    assert {f"{name}.svg" for name, _, _ in found} == {path.name for path in (LAB / "figures").iterdir()}
    for name, unit, bars in found:
        drawn = (LAB / "figures" / f"{name}.svg").read_text()
        assert unit in drawn, name
        assert [bar for bar in bars if f">{bar[1]:g}<" not in drawn or f">{bar[0]}<" not in drawn] == [], name


FILES = [
    f"/{path.relative_to(ROOT)}"
    for room in ("src", "tests", "benchmarks", "examples", "scripts")
    for path in (ROOT / room).rglob("*.py")
]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"])
INSTALLED = re.compile(r"pip install '?evener\b.*")
"""By name, which only a package index knows."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_named_on_a_page_exists(page: Path) -> None:
    named = re.findall(r"`([\w/]+/\w+\.py)\b", page.read_text())
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in FILES)] == []


_NAMED = re.compile(r"`([\w/]+/\w+\.py):\s+((?:\w+)(?:\.\w+)*)(?:\(\))?`")
"""A file and what it defines, as `training/loop.py: Loop.run`."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_definition_that_a_page_names_is_in_that_file(page: Path) -> None:
    missing = []
    for file, names in _NAMED.findall(page.read_text()):
        texts = [(ROOT / path[1:]).read_text() for path in FILES if path.endswith(f"/{file}")]
        for name in names.split("."):
            if not any(re.search(rf"\b(class|def) {name}\b|^\s*{name}\b.*[:=]", text, re.M) for text in texts):
                missing.append(f"{file}: {name}")
    assert missing == []


def test_the_page_on_strategies_has_every_method_of_a_model_that_ranks_train_together() -> None:
    page = (ROOT / "docs" / "adding-a-strategy.md").read_text()
    table = page.partition("| method | promise |")[2].partition("\n\n")[0]
    listed = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert listed == {name for name, value in vars(ParallelModel).items() if callable(value) and name[0] != "_"}


BUILD = [
    *(ROOT / name for name in ("Makefile", "pyproject.toml", "mkdocs.yml", ".pre-commit-config.yaml", ".ci/run")),
    ROOT / "scripts" / "check",
    *sorted(ROOT.glob(".github/**/*.*")),
]
SOURCES = [
    path for room in ("src", "scripts", "benchmarks", "examples", "tests") for path in (ROOT / room).rglob("*.py")
]
_PATH = re.compile(r"(?<![\w./-])(?:src|tests|docs|scripts|examples|benchmarks|\.ci|\.github)/[\w./*-]*[\w*](::\w+)?")


def _missing_paths(text: str) -> list[str]:
    """Return the paths and test names in `text` that the tree lacks; `*` stands for any part of a name."""
    missing = []
    for found in _PATH.finditer(text):
        path, _, test = found[0].partition("::")
        files = list(ROOT.glob(path))
        if not files or (test and not any(f"def {test}(" in file.read_text() for file in files)):
            missing.append(found[0])
    return missing


@pytest.mark.parametrize("file", [*PAGES, *BUILD], ids=lambda file: str(file.relative_to(ROOT)))
def test_every_path_in_a_page_or_build_file_exists(file: Path) -> None:
    assert _missing_paths(file.read_text()) == []


def test_every_path_in_a_comment_exists() -> None:
    missing = {
        str(file.relative_to(ROOT)): _missing_paths(file.read_text()) for file in SOURCES if file != Path(__file__)
    }
    assert {file: paths for file, paths in missing.items() if paths} == {}


@pytest.mark.parametrize(
    "text", ["pytest tests/nowhere -m slow", "`tests/test_documents.py::test_nothing`", "(docs/no.md)"]
)
def test_missing_path_is_detected(text: str) -> None:
    assert len(_missing_paths(text)) == 1


@pytest.mark.parametrize(("tag", "is_released"), [(f"v{VERSION}", True), (f"v{VERSION}9", False)])
def test_release_needs_a_tag_equal_to_the_version(tag: str, is_released: bool) -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["build"]["steps"]
    (check,) = [step["run"] for step in steps if "GITHUB_REF_NAME" in step.get("run", "")]
    environment = {**os.environ, "GITHUB_REF_NAME": tag}
    ended = subprocess.run(["bash", "-c", check], cwd=ROOT, env=environment, check=False, timeout=60)
    assert (ended.returncode == 0) is is_released


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_symbol_that_a_page_names_is_in_its_file(page: Path) -> None:
    for name, symbol in re.findall(r"`([\w/]+\.py)(?:: |`: `)(\w+)", page.read_text()):
        texts = [(ROOT / file[1:]).read_text() for file in FILES if file.endswith(f"/{name}")]
        assert any(re.search(rf"\b{symbol}\b", text) for text in texts), f"{symbol} in {name}"


@pytest.mark.parametrize("sentence", quoted("docs/troubleshooting.md"))
def test_every_sentence_quoted_in_troubleshooting_is_in_the_code(sentence: str) -> None:
    assert len(sentence.replace(".", "")) >= 9, "too short to be looked for"
    assert is_said(sentence)


def test_sentence_missing_in_the_code_is_detected() -> None:
    assert is_said("rank ... did not start within ... s")
    assert not is_said("rank ... did not begin within ... s")
