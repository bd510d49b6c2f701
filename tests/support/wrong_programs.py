"""Mistakes in programs, batch tasks, thin tasks, data and files, and unusual environments, drawn by a seed.

A program or task is a text that trains, in which one line is replaced by a mistake that users make.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from itertools import cycle

from support.wrong_inputs import WrongInput

PROGRAM = """
import sys
import torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
import evener

class Samples(Dataset):
    def __len__(self): return 65
    def __getitem__(self, i): return item(i), 0

run = evener.join()
torch.manual_seed(0)
x, y = torch.randn(65, 4), torch.arange(65) % 2
batch, epochs = 13, 1
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
loss_of = nn.functional.cross_entropy
data = TensorDataset(x, y)
#BEFORE
loader = DataLoader(data, batch_size=batch, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
#MADE
model, optimizer, loader = run.prepare(model, optimizer, loader)
#PREPARED
for epoch in run.epochs(epochs):
    for inputs, targets in loader:
        #BATCH
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        #LOSS
        loss.backward()
        #BACKWARD
        optimizer.step()
        shown = run.mean(loss)
if run.leader:
    Path("done").write_text(str(shown))
"""
BATCH_TASK = """
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from evener import BatchTask

def data(samples=65, classes=2):
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.arange(samples) % classes)

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

class Stream(IterableDataset):
    def __iter__(self): return iter(items)

words = dict(model=net, loss=loss, train_data=data, batch_size=13, epochs=1)
"""
THIN_TASK = """
import numpy as np
from evener import ThinTask
from evener.autodiff import functional as F, nn, optim

rng = np.random.default_rng(0)
x, y = rng.normal(size=(65, 4)).astype(np.float32), np.arange(65) % 2

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

words = dict(model=net, loss=F.cross_entropy, train_data=lambda: (x, y), batch_size=13, epochs=1,
             optimizer=lambda p: optim.SGD(p, lr=0.1))
"""

_MISTAKES: Sequence[tuple[str, str]] = (
    ("BEFORE", "model = nn.Linear(3, 2)"),
    ("BEFORE", "y = torch.arange(65) % 5; data = TensorDataset(x, y)"),
    ("BEFORE", "data = TensorDataset(x, -y)"),
    ("BEFORE", "import nonsense_module_x"),
    ("BEFORE", "from torch import nonsense_name_x"),
    ("BEFORE", "item = lambda i: [][i]; data = Samples()"),
    ("BEFORE", "item = lambda i: {}[i] if i == 60 else torch.ones(4); data = Samples()"),
    ("BEFORE", "item = lambda i: torch.ones(4 + (i == 60)); data = Samples()"),
    ("BEFORE", "item = lambda i: None; data = Samples()"),
    ("BEFORE", "data = TensorDataset(x * float('nan'), y)"),
    ("BEFORE", "data = TensorDataset(x.double(), y)"),
    ("BEFORE", "model = model.half()"),
    ("BEFORE", "model = model.double()"),
    ("BEFORE", "model = model.to('meta')"),
    ("BEFORE", "model = model.cuda()"),
    ("BEFORE", "data = TensorDataset(x[:0], y[:0])"),
    ("BEFORE", "batch = 1000; epochs = 0"),
    ("BEFORE", "batch = 64"),
    ("BEFORE", "batch = 0"),
    ("BEFORE", "batch = '8'"),
    ("BEFORE", "epochs = -1"),
    ("BEFORE", "epochs = 'two'"),
    ("BEFORE", "loss_of = lambda o, t: nn.functional.cross_entropy(o, t, reduction='none')"),
    ("BEFORE", "loss_of = lambda o, t: nn.functional.cross_entropy(o, t, reduction='sum')"),
    ("BEFORE", "loss_of = lambda o, t: nn.functional.cross_entropy(o, t).item()"),
    ("BEFORE", "loss_of = lambda o, t: nn.functional.cross_entropy(o, t).detach()"),
    ("BEFORE", "loss_of = lambda o, t: o.mean() * float('nan')"),
    ("BEFORE", "loss_of = lambda o, t: nn.functional.mse_loss(o, t)"),
    ("BEFORE", "raise SystemExit(3)"),
    ("BEFORE", "raise SystemExit('bad arguments')"),
    ("BEFORE", "raise KeyboardInterrupt"),
    ("BEFORE", "import os; os._exit(5)"),
    ("BEFORE", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
    ("BEFORE", "raise ValueError('first line\\nsecond line')"),
    ("BEFORE", "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()"),
    ("BEFORE", "def f(): return f()\nf()"),
    ("BEFORE", "import argparse; argparse.ArgumentParser().parse_args(['--nonsense'])"),
    ("BEFORE", "run2 = evener.join()"),
    ("BEFORE", "run.nonsense()"),
    ("BEFORE", "x = open('nowhere.csv').read()"),
    ("BEFORE", "model = nn.Sequential(nn.LazyLinear(2))"),
    ("BEFORE", "model.requires_grad_(False)"),
    ("MADE", "optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)"),
    ("MADE", "optimizer = torch.optim.SGD(model.parameters(), lr=-1)"),
    ("MADE", "optimizer = torch.optim.SGD([], lr=0.1)"),
    ("MADE", "optimizer = None"),
    ("MADE", "loader = None"),
    ("MADE", "loader = [(x, y)]"),
    ("MADE", "model = lambda x: x"),
    ("MADE", "optimizer = torch.optim.SGD"),
    ("MADE", "model, optimizer = optimizer, 'text'"),
    ("MADE", "loader = DataLoader(data, batch_size=None)"),
    ("MADE", "loader = DataLoader(data, batch_size=13, num_workers=1, collate_fn=lambda b: 1 / 0)"),
    ("MADE", "loader = DataLoader(data, batch_size=13, num_workers=1, worker_init_fn=lambda w: sys.exit(4))"),
    ("MADE", "loader = DataLoader(data, batch_size=13, sampler=[0, 1, 99] * 10)"),
    ("MADE", "loader = DataLoader(data, batch_size=13, sampler=[])"),
    ("MADE", "run.prepare(model, count='nonsense')"),
    ("MADE", "run.prepare(model, count=lambda: 1)"),
    ("MADE", "run.prepare(model, optimizer, loader, count=lambda batch: 0)"),
    ("MADE", "run.prepare()"),
    ("PREPARED", "run.mean(3)"),
    ("PREPARED", "run.mean('x')"),
    ("PREPARED", "run.sum(None)"),
    ("PREPARED", "run.share([])"),
    ("PREPARED", "run.share(x[:0])"),
    ("PREPARED", "run.state(3)"),
    ("PREPARED", "model.load_state_dict({})"),
    ("PREPARED", "model.load_state_dict(torch.load('nowhere.pt'))"),
    ("PREPARED", "torch.save(model.state_dict(), 'no/such/folder/x.pt')"),
    ("BATCH", "inputs = inputs.to('cuda')"),
    ("BATCH", "targets = targets.float()"),
    ("BATCH", "inputs = inputs[:1]"),
    ("BATCH", "inputs = inputs.numpy()"),
    ("BATCH", "inputs = inputs[:, :2]"),
    ("BATCH", "inputs.requires_grad = 'yes'"),
    ("BATCH", "if run.rank == 1: raise ValueError('only here')"),
    ("BATCH", "if run.rank == 1: sys.exit(0)"),
    ("BATCH", "if run.rank == 1: break"),
    ("BATCH", "if not run.leader: import os; os._exit(0)"),
    ("LOSS", "loss = loss + undefined_name"),
    ("LOSS", "loss.backward()"),
    ("LOSS", "run.mean(loss, 3)"),
    ("LOSS", "loss = run.ratio(loss, 0)"),
    ("LOSS", "assert loss < 0, 'the loss is positive'"),
    ("BACKWARD", "run.mean(float('inf'))"),
    ("BACKWARD", "if torch.rand(()) < 2: raise StopIteration"),
    ("BACKWARD", "optimizer.param_groups[0]['lr'] = 'high'"),
    ("BACKWARD", "optimizer.param_groups[0]['lr'] = float('nan')"),
    ("BACKWARD", "model[0].weight.data = torch.ones(3, 3)"),
    ("BACKWARD", "model[0].weight.grad = None"),
    ("BACKWARD", "del model"),
)
_HARMLESS = (
    "loss_of = lambda o, t: nn.functional.cross_entropy(o, t, reduction='sum')",
    "model = model.double()",
    "epochs = -1",
    "run2 = evener.join()",
    "batch = 1000; epochs = 0",
    "batch = 64",
    "data = TensorDataset(x * float('nan'), y)",
    "x = y",
    "run.mean(float('inf'))",
    "model[0].weight.grad = None",
    "optimizer.param_groups[0]['lr'] = float('nan')",
    "inputs = inputs[:1]",
    "loss_of = lambda o, t: o.mean() * float('nan')",
    "run.mean(3)",
    "run.prepare()",
    "run.share([])",
    "if run.rank == 1",
    "if not run.leader",
    "run.prepare(model, optimizer, loader",
    "loader = [(x, y)]",
    "optimizer = torch.optim.SGD(nn.Linear",
    "loader = DataLoader(data, batch_size=13, sampler=[])",
    "data = TensorDataset(x[:0], y[:0])",
    "raise SystemExit(3)",
)
"""Mistakes that PyTorch may accept where the program runs on one node, or that the program never reaches."""


def mistaken(at: str, line: str) -> str:
    """The program with one mistake."""
    spaces = " " * (8 if at in ("BATCH", "LOSS", "BACKWARD") else 0)
    return PROGRAM.replace(f"{spaces}#{at}\n", f"{spaces}{line}\n")


def _program(draw: random.Random) -> WrongInput:
    """A program with a mistake."""
    at, line = draw.choice(_MISTAKES)
    how: tuple[str, ...] = draw.choice(
        [(), ("--local-nodes", "1,1"), ("--local-nodes", "1,0.5", "--strategy", "filter")]
    )
    may_work = line.startswith(_HARMLESS)
    return WrongInput(("run", "p.py", *how), {"p.py": mistaken(at, line)}, is_cheap=False, may_work=may_work)


_WRONG_BATCH_TASKS = (
    "words['loss'] = lambda m, b: m(b[0])",
    "words['loss'] = lambda m, b: None",
    "words['loss'] = lambda m, b: (m(b[0]).sum(), 0)",
    "words['loss'] = lambda m, b: (m(b[0]).sum(), -3)",
    "words['loss'] = lambda m, b: (m(b[0]).sum(), 'x')",
    "words['loss'] = lambda m, b: m(b[0]).mean() * float('nan')",
    "words['loss'] = lambda m, b: m(b['x']).mean()",
    "words['loss'] = lambda m: 0",
    "words['loss'] = lambda m, b: 1.0",
    "words['loss'] = lambda m, b: m(b[0]).mean().detach()",
    "words['loss'] = lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1] + 7)",
    "words['loss'] = lambda m, b: nn.functional.cross_entropy(m(b[0].double()), b[1])",
    "words['loss'] = lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction='sum')",
    "words['count'] = 'x'",
    "words['count'] = lambda b: 0",
    "words['count'] = lambda b: None",
    "words['count'] = lambda b: float('nan')",
    "words['count'] = lambda b: 1 / 0",
    "words['collate'] = lambda b: None",
    "words['collate'] = lambda b: 1 / 0",
    "words['collate'] = 3",
    "words['metrics'] = {'a': 3}; words['validation_data'] = data",
    "words['metrics'] = {'a': lambda m, b: 'x'}; words['validation_data'] = data",
    "words['metrics'] = {'a': lambda m, b: 1 / 0}; words['validation_data'] = data",
    "words['metrics'] = {'a': lambda m, b: (1, 0)}; words['validation_data'] = data",
    "words['metrics'] = ['accuracy']; words['validation_data'] = data",
    "words['metrics'] = {3: lambda m, b: 1.0}; words['validation_data'] = data",
    "words['validate'] = lambda m, r: 3; words['validation_data'] = data",
    "words['validate'] = lambda m, r: {'a': 'x'}; words['validation_data'] = data",
    "words['validate'] = lambda m, r: 1 / 0; words['validation_data'] = data",
    "words['optimizer'] = lambda m: torch.optim.SGD(m.parameters(), lr=-1)",
    "words['optimizer'] = lambda m: torch.optim.SGD(net().parameters(), lr=1)",
    "words['optimizer'] = lambda m: None",
    "words['optimizer'] = lambda m: torch.optim.SGD(m, lr=1)",
    "words['optimizer'] = torch.optim.SGD",
    "words['scheduler'] = lambda o, n: 3",
    "words['scheduler'] = lambda o: torch.optim.lr_scheduler.ConstantLR(o)",
    "words['train_data'] = lambda: data(0)",
    "words['train_data'] = lambda: [1, 2, 3]",
    "words['train_data'] = lambda: 7",
    "words['train_data'] = data()",
    "words['batch_size'] = 66",
    "words['batch_size'] = 64",
    "words['batch_size'] = -1",
    "words['batch_size'] = True",
    "words['epochs'] = 0",
    "words['epochs'] = '3'",
    "words['model'] = lambda: (net(), net())",
    "words['model'] = lambda: net().double()",
    "words['model'] = lambda: 1 / 0",
    "items = []; words['train_data'] = Stream",
    "items = None; words['train_data'] = Stream",
    "items = [(torch.ones(4), 0)] * 5; words['train_data'] = Stream",
    "items = [(torch.ones(4 + (i == 20)), 0) for i in range(65)]; words['train_data'] = Stream",
    "words['nonsense'] = 1",
    "del words['loss']",
    "words['name'] = 7",
    "words['train_data'] = lambda: TensorDataset(torch.randn(65, 4), torch.arange(65) % 2)",
)
_MAY_TRAIN = (
    "words['batch_size'] = 64",
    "words['metrics'] = {'a': lambda m, b: (1, 0)}",
    "items = [(torch.ones(4), 0)] * 5",
    "words['train_data'] = lambda: TensorDataset",
    "words['batch_size'] = 66",
    "words['optimizer'] = lambda m: torch.optim.SGD(net()",
    "words['epochs'] = 0",
    "words['train_data'] = data()",
    "words['metrics'] = {3",
    "words['loss'] = lambda m, b: (m(b[0]).sum(), -3)",
)
_SUM = "reduction='sum'"
"""A loss that one process may train, and several nodes may not, which divide batches."""


def _batch_task(draw: random.Random) -> WrongInput:
    """A batch task with a mistake."""
    line = draw.choice(_WRONG_BATCH_TASKS)
    how: tuple[str, ...] = draw.choice([(), ("--local-nodes", "1,1"), ("--workers", "1"), ("--precision", "bf16")])
    text = f"{BATCH_TASK}{line}\ntask = BatchTask(**words)\n"
    may_work = line.startswith(_MAY_TRAIN) or (_SUM in line and "--local-nodes" not in how)
    return WrongInput(("train", "b.py", "--output", "out", *how), {"b.py": text}, is_cheap=False, may_work=may_work)


_WRONG_THIN_TASKS = (
    "words['train_data'] = lambda: (x[:0], y[:0])",
    "words['train_data'] = lambda: (x, y[:3])",
    "words['train_data'] = lambda: x",
    "words['train_data'] = lambda: (x[:, :3], y)",
    "words['train_data'] = lambda: (x, y + 5)",
    "words['train_data'] = lambda: (x * np.nan, y)",
    "words['train_data'] = lambda: (x.astype(str), y)",
    "words['train_data'] = lambda: 1 / 0",
    "words['train_data'] = lambda: np.load('nowhere.npy')",
    "words['model'] = lambda: None",
    "words['model'] = lambda: nn.Linear(4, 0)",
    "words['model'] = lambda: nn.Nonsense(4)",
    "words['model'] = net()",
    "words['loss'] = lambda o, t: o",
    "words['loss'] = lambda o, t: None",
    "words['loss'] = lambda o, t: 1.0",
    "words['optimizer'] = lambda p: optim.SGD(p, lr=-1.0)",
    "words['optimizer'] = lambda p: None",
    "words['batch_size'] = 0",
    "words['batch_size'] = 1000",
    "words['epochs'] = 1.5",
    "import torch_nonsense",
)


def _thin_task(draw: random.Random) -> WrongInput:
    """A thin task with a mistake."""
    text = f"{THIN_TASK}{draw.choice(_WRONG_THIN_TASKS)}\nthin_task = ThinTask(**words)\n"
    how = ("train", "t.py", "--agreement", draw.choice(["average", "sync"]), "--local-nodes", "1,1", "--output", "out")
    return WrongInput(how, {"t.py": text}, is_cheap=False)


_ODD_FILES: Sequence[str | bytes] = (
    b"\xef\xbb\xbf{}",
    b"{\r\n}\r\n",
    b"9" * 5000,
    b'{"version": ' + b"9" * 400 + b"}",
    b"\x00" * 64,
    b"[1e999]",
    b"{" * 3000,
    '{"version": 1, "version": 1}',
    "\ufeff",
    b"\x1f\x8b\x08",
    b'"' + b"x" * 70000,
    b"NaN",
    b"-0",
    b"\r\n",
)
_TAKING_A_FILE: Sequence[tuple[str, ...]] = (
    ("report", "FILE"),
    ("plan", "FILE", "--machines", "rtx3090"),
    ("plan", "resnet50", "--profile", "FILE"),
    ("plan", "resnet50", "--machines", "rtx3090", "--learn", "FILE"),
    ("train", "digits", "--plan", "FILE"),
    ("up", "--listen", "127.0.0.1:0", "--system", "FILE"),
    ("join", "127.0.0.1:1", "--token-file", "FILE"),
    ("invite", "--master", "127.0.0.1:1", "--token-file", "FILE"),
    ("dashboard", "FILE"),
    ("trace", "FILE"),
    ("doctor", "--task", "FILE"),
    ("benchmark", "--task", "FILE"),
    ("tune", "FILE", "--vary", "lr=0.1,0.2"),
    ("train", "FILE"),
    ("run", "FILE"),
    ("train", "digits", "--checkpoint", "FILE", "--resume"),
    ("nodes", "--home", "FILE"),
    ("down", "--home", "FILE"),
)


def _odd_file(draw: random.Random) -> WrongInput:
    """A file with a byte order mark, Windows line ends, huge numbers or nesting; or a folder, a device or a pipe."""
    words = draw.choice(_TAKING_A_FILE)
    name = draw.choice(
        ["x.json", "x.py", "x", "folder", "/dev/null", "/dev/zero", "pipe", "loop", "x.json/y", "a" * 300, "\udcff"]
    )
    prefix: tuple[str, ...] = ()
    if name in ("pipe", "loop"):
        made = "mkfifo pipe" if name == "pipe" else "ln -s loop loop"
        prefix = ("bash", "-c", f'{made}; exec "$0" "$@"')
    files: dict[str, str | bytes] = {
        "x.json": draw.choice(_ODD_FILES),
        "x.py": draw.choice(_ODD_FILES),
        "x": draw.choice(_ODD_FILES),
    }
    return WrongInput(
        tuple(name if word == "FILE" else word for word in words),
        files,
        is_cheap=name not in ("x.py",) and words[0] not in ("run", "trace"),
        may_work=words[0] == "run",  # some are Python, of which one process does nothing
        prefix=prefix,
        folders=("folder",),
    )


_ODD_TOMLS: Sequence[str | bytes] = (
    b"\xef\xbb\xbfepochs = 'x'\n",
    b"epochs = 1\r\nnonsense = 2\r\n",
    "epochs = " + "9" * 400,
    "epochs = 1e400",
    "[option]\n'' = 1",
    "batch_size = 0",
    "local_nodes = []",
    "local_nodes = [inf]",
    "local_nodes = {a = 1}",
    "memory = 'much'",
    "strategy = 'magic'",
    "epochs = 0x10000000000000000",
    "a.b.c = 1",
    "[[option]]\na = 1",
    "shares = 'equally'",
    "epochs = '''1\n2'''",
    "seed = -1",
    "option = {epochs = []}",
    "[option]\nwidth = {a = 1}",
    "\x00",
    "lr = 0.1",
    "Epochs = 3",
    "epoch = 3",
    "local-nodes = [1]",
    "checkpoint = ''",
    "output = ''",
    "precision = 'FP16'",
    "clip_norm = -1",
    "[train]\nepochs = 1",
    "dashboard = true",
    "checkpoint_every = 'x s'",
)


def _config(draw: random.Random) -> WrongInput:
    """An `evener.toml` that is odd."""
    text = draw.choice(_ODD_TOMLS)
    task = BATCH_TASK + "task = BatchTask(**words)\n"
    may_work = text in ("output = ''", "local-nodes = [1]")  # the default, and another spelling
    return WrongInput(("train", "b.py"), {"b.py": task, "evener.toml": text}, is_cheap=False, may_work=may_work)


_TRAINS = ("train", "b.py", "--local-nodes", "1,0.5", "--output", "out")
_PROGRAM_TRAINS = ("run", "p.py", "--local-nodes", "1,1", "--run-folder", "out")
_AGREES = ("train", "t.py", "--agreement", "average", "--local-nodes", "1,1", "--output", "out")
_COMMANDS: Sequence[tuple[str, ...]] = (
    _TRAINS,
    _TRAINS,
    _PROGRAM_TRAINS,
    _AGREES,
    ("plan", "resnet50", "--machines", "rtx3090"),
    ("version",),
    ("doctor",),
    ("trace", "b.py"),
    ("catalogue",),
    ("--help",),
)
_IGNORE = "import signal, os, sys; signal.signal(signal.{0}, signal.SIG_IGN); os.execvp(sys.argv[1], sys.argv[1:])"
_ENVIRONMENTS: Sequence[tuple[tuple[str, ...], dict[str, str]]] = (
    (("env", "-u", "HOME"), {}),
    (("env", "-i"), {}),
    (("bash", "-c", 'exec "$0" "$@" <&-'), {}),
    (("bash", "-c", 'exec "$0" "$@" >&-'), {}),
    (("bash", "-c", 'exec "$0" "$@" >&- <&-'), {}),
    (("bash", "-c", 'exec "$0" "$@" >/dev/full'), {}),
    (("bash", "-c", '"$0" "$@" | true; exit ${PIPESTATUS[0]}'), {}),
    (("bash", "-c", 'ulimit -n 32; exec "$0" "$@"'), {}),
    (("bash", "-c", 'ulimit -n 64; exec "$0" "$@"'), {}),
    (("bash", "-c", 'ulimit -s 256; exec "$0" "$@"'), {}),
    (("bash", "-c", 'ulimit -c 0; umask 777; exec "$0" "$@"'), {}),
    (("bash", "-c", 'mkdir d; cd d; rmdir ../d; exec "$0" "$@"'), {}),
    (("unshare", "-m", "bash", "-c", 'mount -t tmpfs -o size=64k none /dev/shm; exec "$0" "$@"'), {}),
    (("unshare", "-m", "bash", "-c", 'mount -t tmpfs -o size=2m none /dev/shm; exec "$0" "$@"'), {}),
    (("unshare", "-m", "bash", "-c", 'mount -t tmpfs -o ro none /dev/shm; exec "$0" "$@"'), {}),
    (("unshare", "-m", "bash", "-c", 'mount -t tmpfs -o ro none gone; TMPDIR=$PWD/gone exec "$0" "$@"'), {}),
    (("unshare", "-m", "bash", "-c", 'mount -t tmpfs -o size=16k none gone; TMPDIR=$PWD/gone exec "$0" "$@"'), {}),
    (("unshare", "-m", "bash", "-c", 'mount -t tmpfs none /sys; exec "$0" "$@"'), {}),
    (("unshare", "-m", "bash", "-c", 'mount --bind . . ; mount -o remount,ro,bind . ; cd . ; exec "$0" "$@"'), {}),
    (("unshare", "-n", "bash", "-c", 'ip link set lo up; exec "$0" "$@"'), {}),
    (("unshare", "-n"), {}),
    (("unshare", "-u", "bash", "-c", 'hostname no-such-host-x; exec "$0" "$@"'), {}),
    (("unshare", "-u", "bash", "-c", 'hostname "ho st"; exec "$0" "$@"'), {}),
    ((sys.executable, "-c", _IGNORE.format("SIGCHLD")), {}),
    ((sys.executable, "-c", _IGNORE.format("SIGINT")), {}),
    ((sys.executable, "-c", _IGNORE.format("SIGTERM")), {}),
    ((sys.executable, "-c", _IGNORE.format("SIGHUP")), {}),
    ((), {"PYTHONWARNINGS": "error"}),
    ((), {"PYTHONWARNINGS": "nonsense"}),
    ((), {"PYTHONOPTIMIZE": "1"}),
    ((), {"PYTHONOPTIMIZE": "2"}),
    ((), {"PYTHONSAFEPATH": "1"}),
    ((), {"PYTHONDEVMODE": "1"}),
    ((), {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}),
    ((), {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/proc/none"}),
    ((), {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    ((), {"COLUMNS": "20"}),
    ((), {"COLUMNS": "1"}),
    ((), {"http_proxy": "http://127.0.0.1:1", "https_proxy": "nonsense", "ALL_PROXY": "socks5://127.0.0.1:1"}),
    ((), {"OMP_NUM_THREADS": "garbage"}),
    ((), {"OMP_NUM_THREADS": "4,2"}),
    ((), {"CUDA_VISIBLE_DEVICES": "garbage,3"}),
    ((), {"CUDA_VISIBLE_DEVICES": ""}),
    ((), {"MALLOC_PERTURB_": "165"}),
    ((), {"TORCH_LOGS": "nonsense"}),
    ((), {"TORCH_DISTRIBUTED_DEBUG": "nonsense"}),
    ((), {"GLOO_SOCKET_IFNAME": "lo"}),
    ((), {"NCCL_DEBUG": "nonsense"}),
    ((), {"LD_PRELOAD": "/nowhere.so"}),
    ((), {"PYTHONSTARTUP": "/nowhere", "PYTHONINSPECT": ""}),
    ((), {"DISPLAY": ":99", "MPLBACKEND": "nonsense"}),
    ((), {"TERM": "dumb", "NO_COLOR": "1", "FORCE_COLOR": "1"}),
    ((), {"SOURCE_DATE_EPOCH": "x", "TZ": "Nowhere"}),
)


def _environment(draw: random.Random) -> WrongInput:
    """A whole command in an unusual environment: it works, or ends by a sentence."""
    prefix, variables = draw.choice(_ENVIRONMENTS)
    files: dict[str, str | bytes] = {
        "b.py": BATCH_TASK + "task = BatchTask(**words)\n",
        "t.py": THIN_TASK + "thin_task = ThinTask(**words)\n",
        "p.py": PROGRAM,
    }
    return WrongInput(
        draw.choice(_COMMANDS), files, variables, is_cheap=False, may_work=True, prefix=prefix, folders=("gone",)
    )


_YAML = """path: images
train: train
val: val
names: {0: a, 1: b}
"""
_WRONG_YAMLS: Sequence[str | bytes] = (
    "",
    "train",
    "train: nowhere\nval: nowhere\nnames: [a]\n",
    _YAML.replace("names: {0: a, 1: b}\n", ""),
    _YAML.replace("{0: a, 1: b}", "3"),
    _YAML + "nc: 7\n",
    _YAML + "nc: x\n",
    b"\xef\xbb\xbf" + _YAML.encode(),
    _YAML.replace("\n", "\r\n"),
    _YAML.replace("val: val\n", ""),
    _YAML.replace("images", "/proc"),
    "- a\n- b\n",
    b"\xff\xfe",
    "a: [",
    "a:\tb\n\tc",
)


def _data_yaml(draw: random.Random) -> WrongInput:
    """A YOLO data set that is described wrongly."""
    words = ("yolo", "detect", "train", "data=d.yaml", "model=yolov8n.yaml", "epochs=1", "imgsz=32", "project=out")
    how: tuple[str, ...] = draw.choice([(), ("--local-nodes", "1,1")])
    return WrongInput((*words, *how), {"d.yaml": draw.choice(_WRONG_YAMLS)}, is_cheap=False)


def wrong_programs(count: int, seed: int) -> list[WrongInput]:
    """Draw so many different ones, of all kinds in turn."""
    draw, drawn = random.Random(seed), dict[tuple[object, ...], WrongInput]()
    kinds: Sequence[Callable[[random.Random], WrongInput]] = (
        _program,
        _environment,
        _batch_task,
        _odd_file,
        _program,
        _thin_task,
        _environment,
        _config,
        _batch_task,
        _odd_file,
        _program,
        _data_yaml,
    )
    for kind in cycle(kinds):
        one = kind(draw)
        drawn.setdefault((one.name, one.prefix), one)
        if len(drawn) == count:
            return list(drawn.values())
    raise AssertionError
