"""The room can be imported where almost nothing is installed, and brings in little."""

import subprocess
import sys

ABSENT = ("torch", "torchvision", "cryptography", "ssl", "hypothesis")


def test_the_room_imports_neither_torch_nor_what_only_a_master_needs() -> None:
    code = f"import sys, evener.wire.connect; print([name for name in {ABSENT} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_node_without_cryptography_joins_a_master_with_tls() -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from evener.wire.tls import TlsTransport, node_context\n"
        "print(node_context().minimum_version.name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "TLSv1_3"
