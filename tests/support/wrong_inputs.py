"""Wrong inputs of every kind, drawn by a seed: options, variables, files, small programs and addresses.

Every one of them has to be refused: by one sentence on stderr, without a traceback, with an exit code that is not 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from msgspec.structs import fields

from evener.config.option_values import choices_of, description_of, kind_of
from evener.config.options import (
    BenchmarkConfig,
    InviteConfig,
    JoinConfig,
    PlanConfig,
    TraceConfig,
    UpConfig,
)
from evener.config.run_config import RunConfig
from evener.frontends.programs.options import ScriptConfig
from evener.search.options import TuneConfig

TASK = """
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from evener import Task

def data(samples=65, classes=2):
    return TensorDataset(torch.randn(samples, 4), torch.arange(samples) % classes)

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

class Samples(Dataset):
    def __len__(self): return 65
    def __getitem__(self, i): return item(i), 0

words = dict(model=net, loss=nn.functional.cross_entropy, train_data=data, batch_size=13)
"""
PROGRAM = "import evener\nrun = evener.join()\n"


class WrongInput(NamedTuple):
    """A command that has to be refused.

    Attributes:
        words: of `evener`.
        files: beside it, by name.
        variables: of the environment.
        is_cheap: whether it can be refused without PyTorch and without data.
        may_work: whether a command may take no notice of it, and succeed.
        prefix: words of another command that starts this one, such as as another user.
        modes: rights of the files or folders of these names.
        folders: empty ones beside it.
        damage: what is done to the checkpoints of a run that the command finds; empty without such.
    """

    words: tuple[str, ...]
    files: Mapping[str, str | bytes] = {}
    variables: Mapping[str, str] = {}
    is_cheap: bool = True
    may_work: bool = False
    prefix: tuple[str, ...] = ()
    modes: Mapping[str, int] = {}
    folders: tuple[str, ...] = ()
    damage: str = ""

    @property
    def name(self) -> str:
        """The command, and what is wrong beside it, on one line."""
        others = [*(f"{name}={value}" for name, value in self.variables.items()), *map(str, self.files.values())]
        return " ".join([*self.words, *(text.removeprefix(TASK) for text in others if text != PROGRAM)])


def wrong_inputs(count: int, seed: int) -> list[WrongInput]:
    """So many different ones, of all kinds in turn."""
    draw, found = random.Random(seed), dict[str, WrongInput]()
    kinds: Sequence[Callable[[random.Random], WrongInput]] = (
        _wrong_option, _wrong_variable, _wrong_file, _wrong_option, _wrong_task, _wrong_address, _wrong_option,
        _wrong_toml,
    )  # fmt: skip
    number = 0
    while len(found) < count:
        one = kinds[number % len(kinds)](draw)
        found.setdefault(one.name, one)
        number += 1
    return list(found.values())


_COMMANDS: Mapping[tuple[str, ...], type[Any]] = {
    ("train", "own.py"): RunConfig,
    ("run", "program.py"): ScriptConfig,
    ("tune", "own.py", "--vary", "lr=0.1..0.2"): TuneConfig,
    ("plan", "resnet50", "--machines", "rtx3090"): PlanConfig,
    ("benchmark",): BenchmarkConfig,
    ("trace", "own.py"): TraceConfig,
    ("up", "--listen", "127.0.0.1:0"): UpConfig,
    ("join", "127.0.0.1:1", "--token", "x"): JoinConfig,
    ("invite",): InviteConfig,
}
_NUMBERS = ("x", "", "1e400", "-inf", "nan", "-3", "9" * 30, "-" + "9" * 30, "0x10", "1;2", "²")
_WRONG_TEXTS: Mapping[str, Sequence[str]] = {
    "local_nodes": ("", "1,", "0", "2", "nan", "-1", "1@x=1", "1@5", "1,two", "1e-9", "1@5=0", "1;1"),
    "devices": ("", "cuda:99", "tpu", "cuda", "cpu,cuda:7"),
    "memory": ("", "lots", "0", "-1GB", "2XB", "1e400GB", "9" * 30 + "GB", "GB", "1 2GB"),
    "shares": ("", "most", "0,0", "nan", "1,", "-1", "1e308", "1,x", "inf"),
    "checkpoint_every": ("", "0", "x", "1m", "-5", "9" * 30, "1.5"),
    "local_steps": ("", "0", "x", "-5", "9" * 30),
    "scale": ("", "x", "0..5", "5..1", "1..99999999999", "3..3", "1,,2", "-1..4"),
    "machines": (
        "",
        "toaster",
        "rtx3090:0",
        "0xrtx3090",
        "99999999999xrtx3090",
        "rtx3090,,rtx3090",
        "rtx3090:999999999",
    ),
    "network": ("", "pigeon", "1"),
    "optimizer": ("", "magic"),
    "listen": ("", "x", ":x", ":99999", "nohost.invalid:7117", "http://here", "unix:", "unix:/proc/none/x"),
    "submitter": ("", "a b", "admin", "x" * 100, "a/b"),
    "ssh": ("", ",", "a,a"),
    "task": ("", "nope", "nope.py", "/proc"),
    "submitters": ("", ",", "a,,b"),
}
"""By field: texts that are none of its values."""
_MISSING_FILES = ("plan", "system", "profile", "learn", "token_file")
_BAD_FOLDERS = ("output", "run_folder", "checkpoint", "save")
_NOT_SIMPLY_WRONG = (
    "option", "vary", "resume", "data", "arguments", "replicas", "ssh_join", "ssh_config", "name", "device", "cache",
    "home", "master", "token", "revoke", "strategy_", "model", "script", "address",
)  # fmt: skip
"""Fields of which no text is wrong by itself, or whose values other kinds of wrong input vary."""


def _wrong_option(draw: random.Random) -> WrongInput:
    """An option with a value that it cannot have."""
    while True:
        words, config = draw.choice(list(_COMMANDS.items()))
        one = draw.choice([one for one in fields(config) if description_of(one) and not one.required])
        kind = kind_of(one)
        texts: Sequence[str] = ()
        if choices_of(one):
            texts = ("", "nonsense", "1")
        elif one.name in _WRONG_TEXTS:
            texts = _WRONG_TEXTS[one.name]
        elif one.name in _MISSING_FILES:
            texts = ("nowhere.json", "/proc/none/x")
        elif one.name in _BAD_FOLDERS:
            texts = ("/proc/none/x", "/dev/null/x")
        elif kind in (int, float) and one.name not in ("seed", "dashboard"):
            texts = _NUMBERS
        elif one.name in ("seed", "dashboard"):
            texts = ("x", "-3", "9" * 30)
        if not texts or one.name in _NOT_SIMPLY_WRONG or (kind is bool) or get_origin(kind) is dict:
            continue
        if get_origin(kind) is tuple and not get_args(get_args(kind)[0]) and one.name != "learn":
            continue
        option = f"--{one.name.replace('_', '-')}={draw.choice(texts)}"
        kept = tuple(word for word in words if not (config is PlanConfig and one.name == "profile" and "rtx" in word))
        if len(kept) != len(words):
            kept = kept[:-1]
        needs_torch = one.name in (*_BAD_FOLDERS, "devices")
        return WrongInput((*kept, option), {"own.py": TASK, "program.py": PROGRAM}, is_cheap=not needs_torch)


def _wrong_variable(draw: random.Random) -> WrongInput:
    """A rank whose launcher left something wrong."""
    variables = {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29399", "EVENER_SECRET": "a secret of the tests",
    }  # fmt: skip
    name = draw.choice([name for name in variables if name != "LOCAL_WORLD_SIZE"])
    wrong: Mapping[str, Sequence[str]] = {
        "RANK": ("x", "-1", "7", ""),
        "WORLD_SIZE": ("x", "0", "-2", "", "9" * 20),
        "LOCAL_RANK": ("x", "-1", "9"),
        "MASTER_ADDR": ("", "nohost.invalid", "not a host", "http://x", "x" * 300),
        "MASTER_PORT": ("x", "0", "-1", "99999", ""),
        "EVENER_SECRET": ("", "short"),
    }
    words = draw.choice([("train", "own.py"), ("run", "program.py"), ("benchmark",), ("train", "digits")])
    variables[name] = draw.choice(wrong[name])
    return WrongInput(words, {"own.py": TASK, "program.py": PROGRAM}, variables)


def _wrong_file(draw: random.Random) -> WrongInput:
    """A file that does not hold what it should."""
    damaged: tuple[str | bytes, ...] = (
        "", "{", "[]", "null", '{"version": 1}', '{"version": 99}', b"\xff\xfe\x00", "[" * 5000, '{"version": "x"}',
        '{"version": 1, "devices": 3}', '{"version": 1, "nonsense": true}',
    )  # fmt: skip
    file = draw.choice(damaged)
    words, name = draw.choice(
        [
            (("train", "own.py", "--plan", "x.json"), "x.json"),
            (("plan", "resnet50", "--profile", "x.json"), "x.json"),
            (("plan", "x.json", "--machines", "rtx3090"), "x.json"),
            (("report", "x.json"), "x.json"),
            (("up", "--listen", "127.0.0.1:0", "--system", "x.json"), "x.json"),
            (("plan", "resnet50", "--machines", "rtx3090", "--learn", "x.json"), "x.json"),
            (("run", "x.py"), "x.py"),
            (("join", "127.0.0.1:1", "--token-file", "x.txt"), "x.txt"),
            (("nodes", "--master", "127.0.0.1:1", "--token-file", "x.txt"), "x.txt"),
        ]
    )
    if name == "x.py":
        file = draw.choice(
            ("def", b"\xff\xfe\x00", "import nonsense_module_x\n", "1/0\n", "raise SystemExit(3)\n", "x = (\n")
        )
    is_cheap = name != "x.py"
    return WrongInput(words, {"own.py": TASK, name: file}, is_cheap=is_cheap)


_WRONG_TASKS = (
    "words['batch_size'] = 64",
    "words['train_data'] = lambda: data(classes=5)",
    "words['validation_data'] = lambda: data(classes=5)",
    "words['train_data'] = lambda: TensorDataset(torch.ones(65, 3), torch.ones(65).long())",
    "words['train_data'] = lambda: data(0)",
    "words['train_data'] = lambda: None",
    "words['train_data'] = lambda: open('nowhere.bin')",
    "words['train_data'] = lambda: TensorDataset(torch.ones(65, 4))",
    "words['train_data'] = lambda: TensorDataset(torch.ones(65, 4), torch.rand(65))",
    "words['train_data'] = lambda: TensorDataset(torch.ones(65, 4).long(), torch.ones(65).long())",
    "item = lambda i: torch.ones(i); words['train_data'] = Samples",
    "item = lambda i: None; words['train_data'] = Samples",
    "item = lambda i: 1 / (i - 30); words['train_data'] = Samples",
    "item = lambda i: 'text'; words['train_data'] = Samples",
    "words['validation_data'] = lambda: data(0)",
    "words['model'] = lambda: None",
    "words['model'] = net()",
    "words['model'] = lambda x: net()",
    "words['model'] = lambda: nn.Linear(4, 2, device='meta')",
    "words['model'] = lambda: nn.LazyLinear(2)",
    "words['model'] = lambda: nn.Linear(4, 2, dtype=torch.complex64)",
    "words['model'] = lambda: net().cuda()",
    "words['model'] = nn.Flatten",
    "words['model'] = lambda: net().requires_grad_(False)",
    "words['loss'] = lambda o: o.mean()",
    "words['loss'] = lambda o, t: o",
    "words['loss'] = lambda o, t: None",
    "words['loss'] = lambda o, t: o.mean().detach()",
    "words['loss'] = lambda o, t: o.mean() * float('nan')",
    "words['loss'] = lambda o, t: o.nope",
    "words['optimizer'] = lambda p: None",
    "words['optimizer'] = lambda p: torch.optim.SGD(p, lr=-1)",
    "words['scheduler'] = lambda o, n: None",
    "words['scheduler'] = lambda o, n: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=1)",
    "words['validation_data'] = data; words['correct'] = lambda o, t: o",
    "words['validation_data'] = data; words['correct'] = lambda o, t: 1 / 0",
    "words['batch_size'] = '8'",
    "words['batch_size'] = 6.5",
    "words['epochs'] = None",
    "words['clip_norm'] = float('nan')",
    "words['name'] = 'x\\nevener: done'",
    "words['nonsense'] = 1",
    "import nonsense_module_x",
    "raise SystemExit(0)",
    "words['train_data'] = lambda: exit(0)",
    "def loop(): return loop()\nwords['model'] = loop",
)


def _wrong_task(draw: random.Random) -> WrongInput:
    """A task whose own code or data fails."""
    change = draw.choice(_WRONG_TASKS)
    how = draw.choice([(), (), (), ("--workers", "1"), ("--precision", "bf16"), ("--accumulate", "2")])
    text = f"{TASK}{change}\ntask = Task(**words)\n"
    return WrongInput(("train", "own.py", "--epochs", "1", *how), {"own.py": text}, is_cheap=False)


def _wrong_address(draw: random.Random) -> WrongInput:
    """An address that leads nowhere, or a token that is none."""
    address = draw.choice(
        ("nohost.invalid:7117", "", ":", "::::", "127.0.0.1", "127.0.0.1:99999", "http://x:1", "a b:1")
    )
    token = draw.choice(("x", "", "evener1-", "evener1-nonsense", "é" * 10))
    words = draw.choice(
        [
            ("join", address, f"--token={token}"),
            ("nodes", f"--master={address}", f"--token={token}"),
            ("train", "own.py", f"--master={address}", f"--token={token}"),
            ("train", "own.py", "--agreement", "sync", f"--master={address}", f"--token={token}"),
            ("stop", f"--master={address}", f"--token={token}"),
            ("invite", f"--master={address}", f"--token={token}"),
            ("doctor", f"--master={address}", f"--token={token}"),
            ("down", "--home", "nowhere"),
            ("train", "own.py", "--agreement", "average"),
        ]
    )
    return WrongInput(words, {"own.py": TASK})


_WRONG_TOMLS: Sequence[str | bytes] = (
    'epochs = "x"', "epochs = 1.5", "epochs = -1", "epochs = nan", "foo = 1", "epochs", "[tune]\nfoo = 1",
    "[foo]\na = 1", "option = 3", "local_nodes = [1.0, 'x']", "local_nodes = true", "seed = 99999999999999999999",
    "patience = inf", "output = 3", 'token = "x"', "local_nodes = [1, 1]\nshares = [0, 0]", 'plan = "none.json"',
    "data = 5", 'resume = "yes"', "precision = 3", 'precision = "fp1"', "compile = 1", "checkpoint_every = 10.5",
    'dashboard = "x"', "epochs = 1979-05-27", "epochs = []", b"\xff\xfe", "memory = [1, true]", "agreement = 1",
    "workers = 9999999999999", 'task = "x"', "started = 1", "home = [1]", 'elastic = "maybe"', "= 1",
    "epochs = 1\nepochs = 2",
)  # fmt: skip


def _wrong_toml(draw: random.Random) -> WrongInput:
    """An `evener.toml` with a mistake."""
    text = draw.choice(_WRONG_TOMLS)
    words = ("tune", "own.py", "--vary", "lr=0.1..0.2") if "tune" in str(text) else ("train", "own.py")
    return WrongInput(words, {"own.py": TASK, "evener.toml": text})


def write(one: WrongInput, folder: Path) -> None:
    """Write its files into `folder`."""
    for name in one.folders:
        (folder / name).mkdir()
    for name, text in one.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    for name, mode in one.modes.items():
        (folder / name).chmod(mode)
