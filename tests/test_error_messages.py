"""The file of messages has those of tests that exist."""

from __future__ import annotations

from pathlib import Path

from support.refusals import MESSAGES, messages


def test_every_message_belongs_to_a_test() -> None:
    root = MESSAGES.parents[1]
    for name in messages():
        path, _, test = name.partition("::")
        assert f"def {test.rpartition('::')[2]}(" in (root / path).read_text(), name


def test_messages_contain_no_local_paths() -> None:
    for name, found in messages().items():
        for message in found:
            assert str(Path.home()) + "/" not in message, name
            assert "pytest-of-" not in message, name
