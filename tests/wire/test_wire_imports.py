"""The room can be imported where almost nothing is installed, and brings in little."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.posix
ABSENT = ("torch", "torchvision", "cryptography", "ssl", "hypothesis")


def test_wire_imports_neither_torch_nor_master_only_modules() -> None:
    code = f"import sys, evener.wire.connect; print([name for name in {ABSENT} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_node_speaks_tls_without_cryptography() -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from evener.wire.tls import TlsTransport, node_context\n"
        "print(node_context().minimum_version.name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "TLSv1_3"
