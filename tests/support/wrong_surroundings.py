"""Wrong surroundings of a command, drawn by a seed: variables, limits, rights, data, checkpoints, pairs of options."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

from support.wrong_inputs import PROGRAM, TASK, WrongInput

FILES = {"own.py": TASK, "program.py": PROGRAM}
WHOLE = TASK + "task = Task(**words)\n"
"""A task that trains."""
NOT_ROOT = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
CHECKPOINTED = "checkpoints-of-another-model"
"""A folder beside the command: what a run of another model left."""


def wrong_surroundings(count: int, seed: int) -> list[WrongInput]:
    """Draw so many different ones, of all kinds in turn."""
    draw, drawn = random.Random(seed), dict[tuple[object, ...], WrongInput]()
    kinds: Sequence[Callable[[random.Random], WrongInput]] = (
        _rubbish_of_a_launcher,
        _rubbish_variable,
        _wrong_data,
        _conflict,
        _wrong_token_file,
        _wrong_checkpoint,
        _conflict,
        _unreadable,
        _wrong_limit,
        _wrong_address,
        _rubbish_variable,
        _wrong_yaml,
    )
    for number in range(100 * count):
        one = kinds[number % len(kinds)](draw)
        drawn.setdefault((one.name, one.prefix, tuple(one.modes.items())), one)
        if len(drawn) == count:
            break
    return list(drawn.values())


_LAUNCHER = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29399",
    "EVENER_SECRET": "a secret of the tests",
}
_SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "a,b",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "0",
    "EVENER_SECRET": "a secret of the tests",
}
_RUBBISH = ("abc", "", " ", "-1", "0", "1e3", "９", "0x7", "1.5", "9" * 25, "1\n2", "\x1b[31m", "a" * 2000)


def _rubbish_of_a_launcher(draw: random.Random) -> WrongInput:
    """A rank one of whose variables is rubbish, or is missing."""
    kind = draw.choice([_LAUNCHER, _LAUNCHER, _SLURM])
    variables = dict(kind)
    names = {
        "RANK": _RUBBISH[:4] + _RUBBISH[5:],
        "WORLD_SIZE": _RUBBISH,
        "LOCAL_RANK": _RUBBISH[:4] + _RUBBISH[5:],
        "MASTER_PORT": _RUBBISH,
        "MASTER_ADDR": ("", " ", "abc.invalid", "-1", "1.2.3", "é.invalid", "::1]", "a:b:c", "a" * 2000),
        "EVENER_SECRET": ("", " ", "a"),
        "SLURM_PROCID": ("abc", "-1", "7"),
        "SLURM_STEP_NUM_TASKS": ("abc", "0", "-2", "9" * 25),
        "SLURM_LOCALID": ("abc", "-1"),
        "SLURM_STEP_NODELIST": ("[", "a[1-", "a[x-y]", "a[5-1]", "a[1-999999999999]"),
        "SLURM_STEP_TASKS_PER_NODE": ("abc", "1(x", "0", "1(x99999999999)"),
        "SLURM_JOB_ID": ("abc", "-1"),
    }
    name = draw.choice([name for name in variables if name in names])
    variables[name] = draw.choice(names[name])
    words = draw.choice([("train", "own.py"), ("run", "program.py"), ("benchmark",), ("train", "digits")])
    return WrongInput(words, {**FILES, "own.py": WHOLE}, variables)


_NO_LAUNCHER: Sequence[tuple[str, Sequence[str]]] = (
    ("OMP_NUM_THREADS", ("-1", "x", "0", "99999999999", "")),
    ("MKL_NUM_THREADS", ("-1", "x")),
    ("LANG", ("xx_XX.nope", "")),
    ("LC_ALL", ("nope", "C")),
    ("PYTHONIOENCODING", ("ascii", "latin-1", "utf-16")),
    ("PYTHONUTF8", ("0",)),
    ("HOME", ("/proc/none", "", "relative", "/dev/null")),
    ("TMPDIR", ("/proc/none", "", "nowhere", "/dev/null")),
    ("COLUMNS", ("3", "0", "-5", "x", "999999999")),
    ("TERM", ("nonsense", "", "dumb")),
    ("NO_COLOR", ("",)),
    ("LINES", ("x",)),
    ("EVENER_HOME", ("/proc/none/x", "")),
    ("EVENER_TOKEN", ("x", "", "é")),
    ("CUDA_VISIBLE_DEVICES", ("abc", "-1", "99")),
    ("TZ", ("Nowhere/None", ":")),
    ("MASTER_PORT", ("abc",)),
    ("WORLD_SIZE", ("0", "x")),
    ("LOCAL_RANK", ("x", "-1")),
    ("XDG_CACHE_HOME", ("/proc/x",)),
    ("GLOO_SOCKET_IFNAME", ("nope0",)),
    ("USER", ("", "é")),
    ("PATH", ("", "/proc/none")),
    ("SHELL", ("/nope",)),
    ("XDG_STATE_HOME", ("/proc/x",)),
    ("GLIBC_TUNABLES", ("rubbish", "a=b=c")),
    ("FORCE_COLOR", ("x",)),
)


def _rubbish_variable(draw: random.Random) -> WrongInput:
    """A variable of the environment that is rubbish, of which a command may take no notice."""
    name, values = draw.choice(_NO_LAUNCHER)
    words = draw.choice(
        [
            ("train", "own.py", "--local-nodes", "1,0.5", "--epochs", "1", "--output", "out"),
            ("train", "own.py", "--agreement", "average", "--local-nodes", "1,1", "--epochs", "1", "--output", "out"),
            ("run", "program.py", "--local-nodes", "1,1"),
            ("plan", "resnet50", "--machines", "rtx3090,v100"),
            ("trace", "own.py"),
            ("catalogue",),
            ("nodes",),
            ("invite",),
            ("version",),
            ("doctor", "--output", "out"),
            ("join", "127.0.0.1:1", "--token", "x"),
        ]
    )
    return WrongInput(words, {**FILES, "own.py": WHOLE}, {name: draw.choice(values)}, is_cheap=False, may_work=True)


def _idx(shape: Sequence[int], kind: int = 8, missing: int = 0) -> bytes:
    size = 1
    for one in shape:
        size *= one
    return bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + bytes(max(0, size - missing))


_MNIST = {
    "train-images-idx3-ubyte": _idx((40, 28, 28)),
    "train-labels-idx1-ubyte": _idx((40,)),
    "t10k-images-idx3-ubyte": _idx((20, 28, 28)),
    "t10k-labels-idx1-ubyte": _idx((20,)),
}
_OWN_DATA = (
    "np.load('x.bin')",
    "torch.load('x.bin')",
    "np.loadtxt('x.bin')",
    "__import__('json').load(open('x.bin'))",
    "__import__('pickle').load(open('x.bin', 'rb'))",
    "open('x.bin').read()",
)


def _wrong_data(draw: random.Random) -> WrongInput:
    """Data that are cut short, empty, of another type, or no data at all."""
    damaged = (b"", b"\x1f\x8b", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"\xff" * 100, b"{", b"\x80\x04.", b"nan\nx\n")
    if draw.random() < 0.4:
        load = f"import numpy as np\nwords['train_data'] = lambda: {draw.choice(_OWN_DATA)}\ntask = Task(**words)\n"
        return WrongInput(("train", "own.py"), {"own.py": TASK + load, "x.bin": draw.choice(damaged)}, is_cheap=False)
    name = draw.choice(list(_MNIST))
    images = "images" in name
    wrong = (
        *damaged,
        _idx((40, 28, 28) if images else (40,), missing=7),
        _idx((40, 28, 28) if images else (40,), kind=0x0D),
        _idx((40,) if images else (40, 2)),
        _idx((3, 28, 28) if images else (3,)),
        _idx((0, 28, 28) if images else (0,)),
        _idx((40, 5, 5) if images else (40,))[:-1] + b"\x63",
        bytes([0, 0, 8, 3]) + b"\xff" * 12 if images else _idx((2**10,))[:8],
    )
    files = {f"data/{one}": content for one, content in _MNIST.items()}
    files[f"data/{name}"] = draw.choice(wrong)
    how: tuple[str, ...] = draw.choice([(), ("--local-nodes", "1,1")])
    return WrongInput(("train", "mnist", "--data", "data", "--epochs", "1", *how), files, is_cheap=False)


_TOGETHER: Sequence[tuple[str, ...]] = (
    ("--plan", "plan.json", "--strategy", "data"),
    ("--local-nodes", "1,1", "--master", "127.0.0.1:1"),
    ("--agreement", "sync", "--strategy", "pipeline"),
    ("--agreement", "async", "--accumulate", "2"),
    ("--agreement", "bounded", "--local-steps", "3"),
    ("--agreement", "sync", "--staleness", "2"),
    ("--agreement", "diloco", "--local-steps", "epoch"),
    ("--agreement", "average", "--outer-lr", "0.5"),
    ("--strategy", "pipeline", "--accumulate", "2"),
    ("--strategy", "data", "--micro-batches", "4"),
    ("--strategy", "data", "--schedule", "gpipe"),
    ("--strategy", "filter", "--stationary"),
    ("--strategy", "pipeline", "--compile"),
    ("--precision", "fp16", "--strategy", "filter"),
    ("--ship-data",),
    ("--token", "x"),
    ("--compress", "int8"),
    ("--robust", "median"),
    ("--merge", "threads"),
    ("--overlap",),
    ("--fraction", "0.5"),
    ("--agreement", "federated", "--fraction", "1.5"),
    ("--agreement", "sync", "--stationary"),
    ("--agreement", "average", "--precision", "fp16"),
    ("--columns", "2", "--strategy", "data"),
    ("--strategy", "pipeline+filter", "--elastic"),
    ("--strategy", "pipeline", "--shares", "1,2"),
    ("--local-nodes", "1,1", "--shares", "1,2,3"),
    ("--local-nodes", "1,1", "--memory", "1GB,1GB,1GB"),
    ("--local-nodes", "1,1", "--shares", "0,0"),
    ("--local-nodes", "1,1", "--strategy", "data+filter", "--replicas", "3"),
    ("--token", "x", "--token-file", "y"),
    ("--agreement", "sync", "--token", "x", "--token-file", "plan.json"),
    ("--batch-size", "1000"),
    ("--accumulate", "100"),
    ("--local-nodes", "1,1", "--agreement", "sync", "--system", "p"),
    ("--local-nodes", "1,1", "--agreement", "sync", "--home", "h"),
    ("--resume", "--agreement", "sync"),
    ("--local-nodes", "1,1", "--devices", "cuda:0"),
    ("--option", "nope=1"),
    ("--option", "x"),
    ("--option", "=1"),
    ("--epochs", "1", "--epochs", "x"),
    ("--nonsense",),
    ("extra",),
    ("--dashboard", "99999"),
    ("--dashboard", "-1"),
    ("--strategy", "data+pipeline", "--replicas", "1,1,1", "--local-nodes", "1,1"),
    ("--members", "3"),
    ("--strategy", "pipeline+filter", "--members", "9", "--local-nodes", "1,1"),
    ("--checkpoint-every", "0s"),
    ("--agreement", "sync", "--robust", "krum", "--merge", "threads"),
    ("--resume",),
    ("--checkpoint-every", "5", "--checkpoint", "own.py"),
    ("--output", "own.py"),
)
_TOGETHER_ELSEWHERE: Sequence[tuple[str, ...]] = (
    ("join", "127.0.0.1:1", "--token", "x", "--token-file", "plan.json"),
    ("join", "127.0.0.1:1"),
    ("join", "127.0.0.1:1", "--token", "x", "--thin", "--device", "cuda:0"),
    ("join", "127.0.0.1:1", "--token", "x", "--built-in-only", "--sandbox"),
    ("join", "127.0.0.1:1", "--token", "x", "--speed", "2"),
    ("join", "127.0.0.1:1", "--token", "x", "--name", "a/b"),
    ("join", "127.0.0.1:1", "--token-stdin", "--token", "x"),
    ("join",),
    ("join", "a:1", "b:2", "--token", "x"),
    ("invite", "--nodes", "2", "--submitter", "bob"),
    ("invite", "--revoke", "x", "--nodes", "2"),
    ("invite", "--revoke", "nope"),
    ("up", "--insecure", "--rotate", "--listen", "0.0.0.0:0"),
    ("up", "--listen", "127.0.0.1:0", "--ssh-join", "x"),
    ("up", "--listen", "127.0.0.1:0", "--ssh-config", "nowhere"),
    ("report",),
    ("report", "nowhere.json"),
    ("report", "own.py"),
    ("report", "."),
    ("dashboard", "nowhere"),
    ("dashboard", "--port", "99999"),
    ("dashboard", "--port", "-1"),
    ("init", "own.py"),
    ("init", "a/b/c.py"),
    ("init", "x.txt"),
    ("demo", "--epochs", "0"),
    ("demo", "--local-nodes", "x"),
    ("plan",),
    ("plan", "nonsense"),
    ("plan", "resnet50"),
    ("plan", "resnet50", "--machines", "rtx3090", "--network", "pigeon"),
    ("plan", "resnet50", "--machines", "rtx3090", "--profile", "plan.json"),
    ("tune", "own.py"),
    ("tune", "own.py", "--vary", "lr"),
    ("tune", "own.py", "--vary", "lr=1..0"),
    ("tune", "own.py", "--vary", "lr=a..b"),
    ("tune", "own.py", "--vary", "lr=0..1:log"),
    ("tune", "own.py", "--vary", "lr="),
    ("experiment", "nonsense"),
    ("tune", "own.py", "--vary", "nope=1,2"),
    ("tune", "own.py", "--vary", "lr=1..2", "--vary", "lr=2..3"),
    ("tune", "own.py", "--vary", "lr=1,2", "--resume"),
    ("tune", "own.py", "--vary", "lr=1,2", "--master", "x:1"),
    ("run",),
    ("run", "nowhere.py"),
    ("run", "."),
    ("run", "own.py"),
    ("run", "program.py", "--strategy", "pipeline"),
    ("run", "program.py", "--local-nodes", "1,1", "--shares", "1"),
    ("trace", "nowhere.py"),
    ("trace", "resnet50"),
    ("doctor", "--task", "nowhere.py"),
    ("doctor", "--nodes"),
    ("stop",),
    ("down",),
    ("nodes",),
    ("nonsense",),
    ("yolo",),
    ("yolo", "nonsense"),
    ("yolo", "detect", "train"),
    ("benchmark", "--task", "nowhere.py"),
    ("train",),
    ("train", "nonsense"),
    ("train", "own"),
    ("train", ""),
    ("train", "yolov99.pt"),
    ("train", "."),
    ("version", "x"),
    ("catalogue", "x"),
    ("experiment", "gpipe", "--nonsense"),
    ("--nonsense",),
)


def _conflict(draw: random.Random) -> WrongInput:
    """Options that exclude each other, or words that lack one another."""
    files = {**FILES, "own.py": WHOLE, "plan.json": "{}", "x.txt": ""}
    if draw.random() < 0.5:
        return WrongInput(("train", "own.py", *draw.choice(_TOGETHER)), files, is_cheap=False)
    return WrongInput(draw.choice(_TOGETHER_ELSEWHERE), files, is_cheap=False)


def _wrong_token_file(draw: random.Random) -> WrongInput:
    """A file of a token that is empty, no text, far too long, of several lines, or a folder."""
    token: str | bytes = draw.choice(
        (
            "",
            "\n",
            " ",
            b"\x00" * 40,
            b"\xff\xfe\x41",
            "é",
            "x\ny\n",
            "evener1-" + "A" * 100_000,
            "x" * 3_000_000,
            "evener1-\r\n",
            "EVENER1-AAAA",
            "evener9-AAAA",
            "\ufeffevener1-AAAA",
        )
    )
    words = draw.choice(
        [
            ("join", "127.0.0.1:1"),
            ("nodes", "--master", "127.0.0.1:1"),
            ("stop", "--master", "127.0.0.1:1"),
            ("train", "own.py", "--master", "127.0.0.1:1"),
            ("doctor", "--master", "127.0.0.1:1"),
            ("invite", "--master", "127.0.0.1:1"),
            ("train", "own.py", "--agreement", "sync", "--master", "127.0.0.1:1"),
        ]
    )
    name = draw.choice(["x.txt", "x.txt", "x.txt", ".", "/dev/null", "x.txt/below"])
    return WrongInput((*words, "--token-file", name), {**FILES, "own.py": WHOLE, "x.txt": token})


def _wrong_checkpoint(draw: random.Random) -> WrongInput:
    """A run that is to go on from checkpoints that are damaged, of another model, or none."""
    damage = draw.choice(
        ["another model", "another batch", "another seed", "cut", "empty", "text", "no folder", "file"]
    )
    folder = CHECKPOINTED
    other = WHOLE.replace("nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)", "nn.Linear(4, 2)")
    files: dict[str, str | bytes] = {"own.py": other if damage == "another model" else WHOLE}
    how: tuple[str, ...] = ()
    if damage == "another batch":
        how = ("--batch-size", "5")
    elif damage == "another seed":
        how = ("--seed", "9")
    elif damage == "no folder":
        folder = draw.choice(["nowhere", "/proc/none"])
    elif damage == "file":
        folder = "own.py"
    nodes: tuple[str, ...] = draw.choice(
        [(), ("--local-nodes", "1,1"), ("--local-nodes", "1,1", "--strategy", "filter")]
    )
    words = ("train", "own.py", "--epochs", "2", "--resume", "--checkpoint", folder, "--output", "out", *how, *nodes)
    return WrongInput(words, files, is_cheap=False, damage=damage)


def _unreadable(draw: random.Random) -> WrongInput:
    """What a user who is not root may not read or write."""
    name, words, mode = draw.choice(
        [
            ("own.py", ("train", "own.py"), 0),
            ("program.py", ("run", "program.py"), 0),
            ("x.json", ("report", "x.json"), 0),
            ("x.json", ("train", "own.py", "--plan", "x.json"), 0),
            ("x.txt", ("join", "127.0.0.1:1", "--token-file", "x.txt"), 0),
            ("evener.toml", ("train", "own.py"), 0),
            ("data/x", ("train", "mnist", "--data", "data"), 0),
            ("locked/x", ("train", "locked/x"), 0),
            ("locked/x", ("train", "own.py", "--output", "locked/out"), 0o555),
            ("locked/x", ("train", "own.py", "--output", "locked/out"), 0),
            ("locked/x", ("train", "own.py", "--checkpoint", "locked"), 0o555),
            ("locked/x", ("train", "own.py", "--checkpoint", "locked", "--resume"), 0),
            ("locked/x", ("up", "--listen", "127.0.0.1:0", "--home", "locked/home"), 0o555),
            ("locked/x", ("up", "--listen", "127.0.0.1:0", "--home", "locked"), 0),
            ("locked/x", ("nodes", "--home", "locked"), 0),
            ("locked/x", ("down", "--home", "locked"), 0),
            ("locked/x", ("invite", "--home", "locked"), 0),
            ("locked/x", ("dashboard", "locked"), 0),
            ("locked/x", ("benchmark", "--output", "locked/x.json"), 0o555),
            ("locked/x", ("trace", "own.py", "--output", "locked/x.json"), 0o555),
            ("locked/x", ("plan", "resnet50", "--machines", "rtx3090", "--save", "locked/x.json"), 0o555),
            ("locked/x", ("init", "locked/new.py"), 0o555),
            ("locked/x", ("demo", "--output", "locked/x"), 0o555),
            ("locked/x", ("tune", "own.py", "--vary", "lr=1,2", "--output", "locked/x"), 0o555),
            ("locked/x", ("run", "locked/x"), 0),
            ("locked/x", ("run", "program.py", "--run-folder", "locked/x/y"), 0),
            ("x.json", ("up", "--listen", "127.0.0.1:0", "--system", "x.json"), 0),
            ("x.json", ("plan", "resnet50", "--profile", "x.json"), 0),
            ("x.json", ("plan", "x.json"), 0),
            ("locked/x", ("report", "locked"), 0),
            ("locked/x", ("doctor", "--task", "locked/x"), 0),
        ]
    )
    locked = name.split("/")[0]
    files: dict[str, str | bytes] = {"own.py": WHOLE, "program.py": PROGRAM, name: WHOLE if name == "own.py" else "{}"}
    return WrongInput(words, files, is_cheap=False, prefix=NOT_ROOT, modes={locked: mode})


def _wrong_limit(draw: random.Random) -> WrongInput:
    """Too few files, processes or bytes, a stream that is closed, or a folder that is gone."""
    limit = draw.choice(
        [
            "ulimit -n 8; ",
            "ulimit -n 16; ",
            "ulimit -n 24; ",
            "ulimit -n 40; ",
            "ulimit -v 300000; ",
            "ulimit -f 0; ",
            "ulimit -f 8; ",
            "cd gone && rmdir ../gone; ",
            "ulimit -n 64; ",
        ]
    )
    words = draw.choice(
        [
            ("train", "own.py", "--local-nodes", "1,1", "--epochs", "1", "--output", "out"),
            ("train", "own.py", "--epochs", "1"),
            ("plan", "resnet50", "--machines", "rtx3090"),
            ("run", "program.py", "--local-nodes", "1,1"),
            ("trace", "own.py"),
            ("train", "own.py", "--agreement", "sync", "--local-nodes", "1,1", "--epochs", "1"),
        ]
    )
    shell = ("bash", "-c", f'{limit}exec "$0" "$@"')
    files: dict[str, str | bytes] = {**FILES, "own.py": WHOLE}
    return WrongInput(words, files, is_cheap=False, may_work=True, prefix=shell, folders=("gone",))


def _wrong_address(draw: random.Random) -> WrongInput:
    """An address that is none, or where nobody listens."""
    address = draw.choice(
        (
            "[::1",
            "[::1]:x",
            "[::1]:1",
            "::1",
            "127.0.0.1:0",
            "127.0.0.1:-1",
            "127.0.0.1:1e3",
            "256.1.1.1:5",
            "1:2:3",
            "a..b:1",
            "é.invalid:1",
            "localhost:",
            ":1",
            "/tmp/x:1",
            "user@127.0.0.1:1",
            "127.0.0.1:1/x",
            " 127.0.0.1:1",
            "a" * 300 + ":1",
            "unix:x",
            "127.0.0.1:７",
            "tcp://127.0.0.1:1",
            "-:1",
            "*:1",
            "a\tb:1",
            "0.0.0.0:1",
            "127.1:1",
        )
    )
    token = draw.choice(("x", "evener1-AAAA"))
    words = draw.choice(
        [
            ("join", f"--token={token}", "--", address),
            ("nodes", f"--master={address}", f"--token={token}"),
            ("stop", f"--master={address}", f"--token={token}"),
            ("tune", "own.py", "--vary", "lr=1,2", f"--master={address}", f"--token={token}"),
            ("up", f"--listen={address}", "--patience", "-1"),
            ("doctor", f"--master={address}", f"--token={token}"),
            ("train", "own.py", "--agreement", "diloco", f"--master={address}", f"--token={token}"),
        ]
    )
    return WrongInput(words, {**FILES, "own.py": WHOLE})


def _wrong_yaml(draw: random.Random) -> WrongInput:
    """YAML with tabs, or TOML of a kind that is none, where Evener reads settings."""
    yaml = draw.choice(
        ("a:\n\tb: 1\n", "epochs: 1\n", "\tepochs = 1\x00", "---\n- 1\n", "a: [", "&a *a", b"\xef\xbb\xbfx")
    )
    words, name = draw.choice(
        [
            (("train", "own.py"), "evener.toml"),
            (("tune", "own.py", "--vary", "lr=1,2"), "evener.toml"),
            (("yolo", "detect", "train", "data=x.yaml", "model=yolov8n.yaml"), "x.yaml"),
            (("yolo", "detect", "train", "cfg=x.yaml"), "x.yaml"),
            (("yolo", "detect", "train", "model=x.yaml"), "x.yaml"),
            (("up", "--listen", "127.0.0.1:0", "--system", "x.yaml"), "x.yaml"),
            (("plan", "x.yaml", "--machines", "rtx3090"), "x.yaml"),
            (("train", "x.yaml"), "x.yaml"),
            (("train", "own.py", "--plan", "x.yaml"), "x.yaml"),
        ]
    )
    return WrongInput(words, {"own.py": WHOLE, name: yaml}, is_cheap=False)
