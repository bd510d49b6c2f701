"""The library stands alone: NumPy, and PyTorch only where it is asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import evener.autodiff

ROOT = Path(evener.autodiff.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def imported(file: Path, only_at_the_top: bool = False) -> set[str]:
    """Full names of the modules that a file imports."""
    tree = ast.parse(file.read_text())
    nodes = tree.body if only_at_the_top else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def test_autodiff_imports_no_other_evener_module() -> None:
    ours = {name for file in FILES for name in imported(file) if name.startswith("evener")}
    assert {name for name in ours if not name.startswith("evener.autodiff")} == set()


def test_autodiff_import_needs_only_numpy() -> None:
    others = {
        name.split(".")[0]
        for file in FILES
        if file.name != "torch_backend.py"
        for name in imported(file, only_at_the_top=True)
    } - sys.stdlib_module_names
    assert others == {"evener", "numpy"}


def test_autodiff_import_loads_neither_pytorch_nor_safetensors() -> None:
    code = (
        "import sys, evener.autodiff; print([m for m in ('torch', 'safetensors', 'numpy.random') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_training_without_pytorch_learns_xor() -> None:
    code = """if True:
        import sys
        sys.modules["torch"] = None
        from evener import autodiff as ad
        from evener.autodiff import functional as F, nn, optim
        ad.manual_seed(1)
        net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer, arena = optim.Adam(net.parameters(), lr=0.05), ad.Arena()
        x, y = ad.tensor([[0., 0.], [0., 1.], [1., 0.], [1., 1.]]), ad.tensor([[0.], [1.], [1.], [0.]])
        for _ in range(300):
            with arena:
                optimizer.zero_grad()
                loss = F.mse_loss(net(x), y)
                loss.backward()
                optimizer.step()
                last = loss.item()
        print(last < 0.01)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "True"
