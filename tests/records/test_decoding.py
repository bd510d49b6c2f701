"""Threads may decode values of a class that none of them has met."""

from __future__ import annotations

import subprocess
import sys

import pytest

from evener.records.decoding import json_decoder, msgpack_decoder

_PROGRAM = """
import sys
import threading
import msgspec
from evener.records.decoding import convert, decode_json, decode_msgpack

class Leaf(msgspec.Struct):
    {leaf}

class Branch(msgspec.Struct):
    {branch}

class Tree(msgspec.Struct):
    {tree}

sys.setswitchinterval(1e-6)
tree = Tree(**{{name: Branch() for name in Tree.__struct_fields__}})
plain = msgspec.to_builtins(tree)
decode = {{
    "json": lambda data=msgspec.json.encode(tree): decode_json(data, Tree),
    "msgpack": lambda data=msgspec.msgpack.encode(tree): decode_msgpack(data, Tree),
    "convert": lambda: convert(plain, Tree),
}}["{kind}"]
begin, decoded = threading.Barrier(4), []

def work():
    begin.wait()
    decoded.append(decode())

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert decoded == [tree] * 4
"""


def fields(name: str, kind: str, count: int) -> str:
    """The fields of a class."""
    return "\n    ".join(f"{name}{number}: {kind}" for number in range(count))


@pytest.mark.parametrize("kind", ["json", "msgpack", "convert"])
def test_threads_decode_a_class_at_once_for_the_first_time(kind: str) -> None:
    program = _PROGRAM.format(
        leaf=fields("leaf", "int = 0", 200),
        branch=fields("branch", "list[Leaf] = []", 200),
        tree=fields("tree", "Branch", 200),
        kind=kind,
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_decoder_is_kept() -> None:
    assert json_decoder(list[int]) is json_decoder(list[int])
    assert json_decoder(list[int]).decode(b"[1]") == [1]
    assert msgpack_decoder(list[int]).decode(b"\x91\x01") == [1]


_FORKING = """
import os
import signal
import sys
import threading
import msgspec
from evener.records.decoding import decode_json

class Leaf(msgspec.Struct):
    {leaf}

class Tree(msgspec.Struct):
    {tree}

class Other(msgspec.Struct):
    number: int

sys.setswitchinterval(1e-6)
data = msgspec.json.encode(Tree(**{{name: Leaf() for name in Tree.__struct_fields__}}))
thread = threading.Thread(target=decode_json, args=(data, Tree))
thread.start()
child = os.fork()
if child == 0:
    signal.alarm(20)
    decode_json(b'{{"number": 1}}', Other)
    decode_json(data, Tree)
    os._exit(0)
thread.join()
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.posix
def test_child_of_a_fork_decodes_while_a_thread_decodes() -> None:
    program = _FORKING.format(leaf=fields("leaf", "int = 0", 2000), tree=fields("tree", "Leaf", 2000))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
