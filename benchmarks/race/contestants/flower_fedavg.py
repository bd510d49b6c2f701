"""Flower: every node trains the same number of samples a round, and FedAvg takes the mean of the weights."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import sys
from pathlib import Path

from course import BATCH, STEPS, Contestant, Course, Started

PROJECT = """
[project]
name = "race"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "race"
[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"
"""
APP = "from contestants.flower_fedavg import make_apps\nclient, server = make_apps({data!r})\n"
CONNECTION = '[superlink]\ndefault = "race"\n[superlink.race]\naddress = "{address}:9093"\ninsecure = true\n'


def launch(course: Course) -> Started:
    """Start a SuperLink, SuperNodes, and a run."""
    app, home = course.folder / "app", course.folder / "flower"
    app.mkdir()
    home.mkdir()
    (app / "pyproject.toml").write_text(PROJECT)
    (app / "app.py").write_text(APP.format(data=str(course.data)))
    (home / "config.toml").write_text(CONNECTION.format(address=course.master))
    tools, own = Path(sys.executable).parent, ["env", f"FLWR_HOME={home}"]
    words = ("--insecure", "--disable-runtime-dependency-installation")
    course.start("master", [*own, str(tools / "flower-superlink"), *words])
    for node in course.nodes:
        address = ("--superlink", f"{course.master}:9092")
        course.start(node.name, [*own, str(tools / "flower-supernode"), "--insecure", *address])
    return course.start("master", [*own, str(tools / "flwr"), "run", str(app), "race", "--stream"])


PAGE = "https://flower.ai/docs/framework/tutorial-quickstart-pytorch.html"
CONTESTANT = Contestant(title="Flower, FedAvg", package="flwr", page=PAGE, launch=launch)


def make_apps(folder: str):
    """Return the app of a node and that of the server."""
    import torch
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from workload import Referee, Windows, make_model, make_optimizer, train_step

    client, server, data, model = ClientApp(), ServerApp(), Windows(Path(folder)), make_model()

    @client.train()
    def train(message, _context):
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer, share = make_optimizer(model.parameters()), BATCH // 3
        for _ in range(STEPS):
            places = torch.randint(len(data.images), (share,))
            train_step(model, optimizer, data.images[places], data.labels[places])
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": share * STEPS})}
        return Message(content=RecordDict(content), reply_to=message)

    @server.main()
    def main(grid, _context):
        referee = Referee(Path(folder))

        def evaluate(number, arrays):
            model.load_state_dict(arrays.to_torch_state_dict())
            if number:
                referee.judge(model, number * STEPS)

        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
        strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=9999, evaluate_fn=evaluate)

    return client, server
