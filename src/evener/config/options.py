"""What other commands than `evener train` are asked, field by field: their options are made of these."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

from msgspec import Meta

from evener.launch.nodes import MIN_SPEED, parse_local_nodes, parse_memory
from evener.records.errors import InvalidInput, require, require_one_of
from evener.records.plan import Strategy
from evener.records.profile import PRECISIONS, Precision
from evener.records.schema import Part
from evener.wire.limits import Limits

PATIENCE = Limits().patience
"""Seconds, where the user says nothing."""
MAX_PATIENCE = 1_000_000
"""Seconds: no timeout of the system's is longer than some multiple of it."""
PORT = 7117
"""Of a master, likewise."""
SSH_JOIN = "evener join"
"""What `evener up --ssh` types on a machine, likewise."""
PROFILE = Path("cluster.json")
"""What `evener benchmark` writes and `evener plan` reads, likewise."""


Home = Annotated[Path | None, Meta(description="Folder of the master; $EVENER_HOME, or ~/.local/state/evener.")]
MasterAddress = Annotated[
    str | None, Meta(description="Address of the master, if it is not that of this machine's home.")
]
MasterToken = Annotated[str | None, Meta(description="Of that master, as `evener up` printed it.")]
TokenFile = Annotated[
    Path | None, Meta(description="File with the token, which `ps` does not show; or set $EVENER_TOKEN.")
]
DataFolder = Annotated[Path | None, Meta(description="Folder of the task's data.")]
Dashboard = Annotated[
    int | None,
    Meta(description="Show it in a browser, at a port of this machine; 7118, or the next free one, if none is said."),
]
TaskOptions = Annotated[dict[str, str], Meta(description="key=value for the task; may be repeated.")]


class NodesConfig(Part, frozen=True, kw_only=True):
    """On which nodes of this machine a command computes: options that several commands have."""

    local_nodes: Annotated[
        str | None,
        Meta(description="Local nodes of these speeds, such as 1.0,0.5,0.25 (1.0@40=0.33: from step 40 on)."),
    ] = None
    devices: Annotated[str, Meta(description="all, cpu, or devices such as cuda:0,cuda:1.")] = "all"
    memory: Annotated[str | None, Meta(description="Memory of every node, such as 4GB or 4GB,512MB.")] = None
    patience: Annotated[float, Meta(description="Seconds of silence after which a node is given up.")] = PATIENCE
    preflight: Annotated[
        bool, Meta(description="Before a run over several machines, see that they reach each other and fit together.")
    ] = True

    def __post_init__(self) -> None:
        require_patience(self.patience)
        if self.local_nodes is not None:
            parse_local_nodes(self.local_nodes)
        if self.memory is not None:
            parse_memory(self.memory)

    @property
    def num_local_nodes(self) -> int | None:
        """As many as were asked for; None: as many as there are devices."""
        return None if self.local_nodes is None else len(self.local_nodes.split(","))


class BenchmarkConfig(NodesConfig, frozen=True, kw_only=True):
    """What `evener benchmark` measures; travels to every rank."""

    task: Annotated[str | None, Meta(description="Also time this task's model by batch size.")] = None
    data: DataFolder = None
    output: Annotated[Path, Meta(description="File of the profile.")] = PROFILE


class TraceConfig(Part, frozen=True, kw_only=True):
    """What `evener trace` draws."""

    task: Annotated[str, Meta(description="Built-in task, or path/to/my_task.py.")]
    data: DataFolder = None
    option: TaskOptions = {}
    output: Annotated[Path, Meta(description="File of the graph.")] = Path("graph.json")


class DemoConfig(Part, frozen=True, kw_only=True):
    """What `evener demo` compares."""

    epochs: Annotated[int | None, Meta(description="Passes over the data in each of the three runs.")] = None
    local_nodes: Annotated[str, Meta(description="Speeds of the local nodes.")] = "1.0,0.5,0.25"
    output: Annotated[Path, Meta(description="Folder of the picture, the page and the records.")] = Path("demo")
    task: str = "digits"


class UpConfig(Part, frozen=True, kw_only=True):
    """What `evener up` is asked; what is None is as it was the last time."""

    listen: Annotated[
        str | None, Meta(description=f"HOST:PORT, or :PORT for all interfaces; as the last time, or :{PORT}.")
    ] = None
    insecure: Annotated[bool, Meta(description="Without encryption.")] = False
    system: Annotated[
        Path | None,
        Meta(description="Let only the nodes join that this file of `evener benchmark` describes; as the last time."),
    ] = None
    rotate: Annotated[bool, Meta(description="New tokens: all that were given out are worth nothing.")] = False
    home: Home = None
    dashboard: Dashboard = None
    patience: Annotated[
        float | None,
        Meta(description=f"Seconds of silence after which a node is given up; as the last time, or {PATIENCE:g}."),
    ] = None
    ssh: Annotated[
        str | None, Meta(description="Start a node on each of these machines, such as gpu1,me@gpu2; they end with it.")
    ] = None
    ssh_join: Annotated[str, Meta(description="What to type there, such as '~/venv/bin/evener join --data /data'.")] = (
        SSH_JOIN
    )
    ssh_config: Annotated[Path | None, Meta(description="OpenSSH's configuration; yours by default.")] = None

    def __post_init__(self) -> None:
        if self.patience is not None:
            require_patience(self.patience)
        is_far = self.ssh is None or not (self.listen or "").startswith("unix:")
        require(is_far, "--listen", self.listen, "HOST:PORT with --ssh, as other machines reach no Unix socket")
        for name in ("ssh_join", "ssh_config"):
            given = getattr(self, name) not in (None, SSH_JOIN)
            require(
                self.ssh is not None or not given, f"--{name.replace('_', '-')}", getattr(self, name), "beside --ssh"
            )


class JoinConfig(Part, frozen=True, kw_only=True):
    """What `evener join` is asked.

    Raises:
        InvalidInput: a value is not allowed, or the token is given twice.
    """

    address: Annotated[str, Meta(description="Of the master, as `evener up` printed it; several with commas between.")]
    token: MasterToken = None
    token_file: TokenFile = None
    token_stdin: Annotated[
        bool, Meta(description="The token is the first line of stdin, and the node ends when that is closed.")
    ] = False
    name: Annotated[str | None, Meta(description="Of this node; the machine's by default.")] = None
    device: Annotated[str | None, Meta(description="cpu, or a device such as cuda:0; the best by default.")] = None
    data: Annotated[Path | None, Meta(description="Folder of the data on this node.")] = None
    speed: Annotated[float, Meta(description="Below 1: slow this node down, for tests.")] = 1.0
    cache: Annotated[Path | None, Meta(description="Folder for code and data that are sent to this node.")] = None
    insecure: Annotated[bool, Meta(description="The master runs without encryption.")] = False
    thin: Annotated[bool, Meta(description="Compute without PyTorch, even if it is installed.")] = False
    built_in_only: Annotated[bool, Meta(description="Run no code that is sent: tasks of Evener's own alone.")] = False
    submitters: Annotated[
        str | None, Meta(description="Run the tasks of these alone, such as alice,bob (see evener invite).")
    ] = None
    sandbox: Annotated[
        bool, Meta(description="Run tasks where they see no files but their own (bubblewrap; docs/security.md).")
    ] = False

    def __post_init__(self) -> None:
        refuse_two_tokens(self.token, self.token_file)
        is_said = self.token is not None or self.token_file is not None
        require(not (self.token_stdin and is_said), "--token-stdin", True, "without --token and --token-file")
        require(MIN_SPEED <= self.speed <= 1, "--speed", self.speed, f"from {MIN_SPEED} to 1")
        require(self.data is None or self.data.is_dir(), "--data", str(self.data), "a folder that is there")
        require(not self.thin or self.device in (None, "cpu"), "--device", self.device, "cpu with --thin")
        names = None if self.submitters is None else self.submitters.split(",")
        require(names is None or all(names), "--submitters", self.submitters, "names with commas between")


class MasterAccess(Part, frozen=True, kw_only=True):
    """How commands such as `evener nodes` find the master. Raises InvalidInput: the token is given twice."""

    home: Home = None
    master: MasterAddress = None
    token: MasterToken = None
    token_file: TokenFile = None

    def __post_init__(self) -> None:
        refuse_two_tokens(self.token, self.token_file)


class NodesAccess(MasterAccess, frozen=True, kw_only=True):
    """What `evener nodes` is asked besides."""

    expel: Annotated[str | None, Meta(description="Send the node of this name away for good.")] = None
    forget: Annotated[str | None, Meta(description="Free a node's name; expelled, it may come back.")] = None


class StopAccess(MasterAccess, frozen=True, kw_only=True):
    """What `evener stop` is asked besides."""

    run: Annotated[str | None, Meta(description="Its name; the one that goes on if none is said.")] = None


class DoctorConfig(MasterAccess, frozen=True, kw_only=True):
    """What `evener doctor` looks at: this machine, or the nodes of a master."""

    nodes: Annotated[
        bool, Meta(description="Look at every node of a master, and at the links between them; so does --master.")
    ] = False

    task: Annotated[str | None, Meta(description="Also load this task and look for its data.")] = None
    data: DataFolder = None
    option: TaskOptions = {}
    output: Annotated[Path, Meta(description="Folder in which runs will be written.")] = Path("runs")

    @property
    def looks_at_nodes(self) -> bool:
        """Whether a master is asked."""
        return self.nodes or self.master is not None or self.home is not None


class InviteConfig(MasterAccess, frozen=True, kw_only=True):
    """What `evener invite` is asked."""

    nodes: Annotated[int, Meta(description="That may join with the token.")] = 1
    hours: Annotated[float, Meta(description="For which it can be used for the first time.")] = 24.0
    submitter: Annotated[
        str | None, Meta(description="Name of somebody who may submit runs with it, instead of nodes.")
    ] = None
    revoke: Annotated[str | None, Meta(description="Make the token of this invitation worthless; members stay.")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.nodes <= 4096, "--nodes", self.nodes, "from 1 to 4096")
        require(0 < self.hours <= 24 * 365, "--hours", self.hours, "above 0, and a year at most")
        name = self.submitter
        is_name = name is None or (name.isidentifier() and len(name) <= 64 and name not in ("admin", "submitter"))
        require(is_name, "--submitter", name, "a name of letters, digits and underscores")


def require_patience(seconds: float) -> None:
    """Raise InvalidValue unless a node can be waited for so long."""
    is_allowed = 0 < seconds <= MAX_PATIENCE
    require(is_allowed, "--patience", seconds, f"positive seconds, and at most {MAX_PATIENCE}")


def refuse_two_tokens(token: str | None, token_file: Path | None) -> None:
    """Raise InvalidInput if both are given."""
    if token is not None and token_file is not None:
        raise InvalidInput("--token and --token-file say the same: leave one of them out")


class PlanConfig(Part, frozen=True, kw_only=True):
    """What `evener plan` is asked.

    Raises:
        InvalidInput: a precision or strategy is not known, or machines are both measured and imagined.
    """

    model: Annotated[str, Meta(description="resnet152, vgg16 ... (see `evener catalogue`), graph.json, or a task.")]
    option: Annotated[dict[str, str], Meta(description="key=value for the network or task; may be repeated.")] = {}
    profile: Annotated[Path | None, Meta(description=f"A ClusterProfile; {PROFILE} by default.")] = None
    machines: Annotated[
        str | None, Meta(description="Machines to imagine instead, such as 4xv100-node,rtx3090:2,rtx4090.")
    ] = None
    network: Annotated[
        str, Meta(description="That joins them: wifi6, 100mbit, 1gbe, 10gbe, 100gbe, infiniband ...")
    ] = "10gbe"
    devices: Annotated[str, Meta(description="Nodes of the profile to take, such as ada,bob; all by default.")] = ""
    batch_size: Annotated[int | None, Meta(description="Samples of one step; the task's, or 32 a device.")] = None
    optimizer: Annotated[str, Meta(description="sgd, momentum or adam.")] = "momentum"
    precision: Annotated[Precision, Meta(description="fp32, bf16, fp16 or fp64.")] = "fp32"
    strategy: Annotated[tuple[Strategy, ...], Meta(description="Look at this one only; may be repeated.")] = ()
    learn: Annotated[tuple[Path, ...], Meta(description="record.json of a past run to correct the profile by.")] = ()
    scale: Annotated[
        str | None,
        Meta(description="Curves over numbers of devices, such as 1..1024; more of the last machine are imagined."),
    ] = None
    save: Annotated[Path | None, Meta(description="Write the plan (or, with --scale, the picture) there.")] = None

    def __post_init__(self) -> None:
        require_one_of("--precision", self.precision, PRECISIONS)
        for strategy in self.strategy:
            require_one_of("--strategy", strategy, get_args(Strategy))
        is_size = self.batch_size is None or 0 < self.batch_size <= 10**9
        require(is_size, "--batch-size", self.batch_size, "from 1 to 10^9")
        if self.profile is not None and self.machines is not None:
            raise InvalidInput("--profile and --machines exclude each other: machines are measured, or imagined")
