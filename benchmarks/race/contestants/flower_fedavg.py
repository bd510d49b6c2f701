"""Flower: every node trains the same number of samples a round, and FedAvg takes the mean of the weights."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from pathlib import Path

from course import BATCH, PORT, STEPS, Contestant, Course, Started

LOCAL_STEPS = 4 * STEPS
FILES = {
    "app/pyproject.toml": '[project]\nname = "race"\nversion = "1.0.0"\n[tool.flwr.app]\npublisher = "race"\n'
    '[tool.flwr.app.components]\nserverapp = "app:server"\nclientapp = "app:client"\n',
    "app/app.py": "from contestants.flower_fedavg import make_apps\n"
    "apps = make_apps({data!r})\nclient = apps[0]\nserver = apps[1]\n",
    "config.toml": '[superlink]\ndefault = "race"\n[superlink.race]\naddress = "{address}"\ninsecure = true\n',
}


def launch(course: Course) -> Started:
    """Start a SuperLink, SuperNodes, and a run."""
    address, home = f"{course.master}:{PORT}", course.folder / "flower"
    (home / "app").mkdir(parents=True)
    for name, text in FILES.items():
        (home / name).write_text(text.format(address=address, data=str(course.data)))
    own = ("env", f"FLWR_HOME={home}")
    words = ("--disable-runtime-dependency-installation", "--host", course.master, "--port", str(PORT))
    link = course.start("master", [*own, "flower-superlink", "--insecure", *words])
    link.wait_for("startup complete", 60)
    course.start_nodes(lambda _: [*own, "flower-supernode", "--insecure", "--superlink", address], course.nodes)
    return course.start("master", [*own, "flwr", "run", str(home / "app"), "race", "--stream"])


PAGE = "https://flower.ai/docs/framework/tutorial-quickstart-pytorch.html"
CONTESTANT = Contestant(title="Flower, FedAvg", package="flwr", page=PAGE, launch=launch, steps=LOCAL_STEPS)


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
        for _ in range(LOCAL_STEPS):
            places = torch.randint(len(data.images), (share,))
            train_step(model, optimizer, data.images[places], data.labels[places])
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": share * LOCAL_STEPS}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    @server.main()
    def main(grid, _context):
        referee = Referee(Path(folder))

        def evaluate(number, arrays):
            model.load_state_dict(arrays.to_torch_state_dict())
            if number:
                referee.judge(model, number * LOCAL_STEPS)

        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
        strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=9999, evaluate_fn=evaluate)

    return client, server
