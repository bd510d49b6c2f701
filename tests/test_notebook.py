"""The notebook that lends its computer to a master, as a script, with the secrets of Colab, of Kaggle and without."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.command_cluster import Cluster, cluster, wait_until

pytestmark = pytest.mark.slow
NOTEBOOK = Path(__file__).parents[1] / "examples" / "join_from_a_notebook.ipynb"
SECRETS = {
    "colab": ("google/colab/__init__.py", "class userdata:\n    get = {'EVENER_TOKEN': %r}.get\n"),
    "kaggle": (
        "kaggle_secrets.py",
        "class UserSecretsClient:\n    def get_secret(self, name):\n        return {'EVENER_TOKEN': %r}[name]\n",
    ),
}


def script_of(ps: Cluster, folder: Path) -> Path:
    """The cells of the notebook, one after the other, with the address of a master."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert text.count('"203.0.113.7:7117"') == 1
    file = folder / "notebook.py"
    file.write_text(text.replace("203.0.113.7:7117", ps.address))
    return file


@pytest.mark.parametrize("place", ["colab", "kaggle", "elsewhere"])
def test_notebook_joins_and_leaves_when_its_cell_is_interrupted(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster() as ps:
        if place in SECRETS:
            name, text = SECRETS[place]
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text % ps.token)
        else:
            monkeypatch.setenv("EVENER_TOKEN", ps.token)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        marker, value = ps.marker.split("=")
        monkeypatch.setenv(marker, value)
        notebook = subprocess.Popen(
            [sys.executable, str(script_of(ps, tmp_path))], stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )
        wait_until(lambda: any(node.score for node in ps.ask().nodes), "that the notebook's node joins")
        notebook.send_signal(signal.SIGINT)
        out, _ = notebook.communicate(timeout=60)
        assert "the node has left" in out
        assert ps.state("notebook") == "left"
        ps.down()
