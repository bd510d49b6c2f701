"""Messages and refusals of `evener run` before PyTorch is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.cli.before import passed_options, require_program
from evener.frontends.programs.options import ScriptConfig
from evener.records.errors import InvalidInput
from support.refusals import refused


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), ""),
        (("3", "-v", "--"), ""),
        (("--secret=abc", "--agreement", "diloco"), "passing to train.py: --secret, --agreement"),
        (
            ("--master", "a:7117"),
            "passing to train.py: --master; the nodes are of this machine, as a master trains tasks only",
        ),
        (("--local-node", "1,1"), "passing to train.py: --local-node, did you mean '--local-nodes'?"),
    ],
)
def test_options_passed_to_the_program_are_named_without_values(arguments: tuple[str, ...], line: str) -> None:
    assert passed_options(Path("train.py"), arguments, ScriptConfig.__struct_fields__) == line


@pytest.mark.parametrize("option", ["--master", "--epochs"])
def test_unknown_option_is_not_taken_for_the_program(option: str) -> None:
    with refused(InvalidInput):
        require_program(Path(option))
