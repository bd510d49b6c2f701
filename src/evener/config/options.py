"""Options of commands other than `evener train`, field by field."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

from msgspec import Meta

from evener.launch.nodes import MIN_SPEED, parse_local_nodes, parse_memory
from evener.records.errors import InvalidInput, require, require_one_of
from evener.records.plan import Strategy
from evener.records.profile import PRECISIONS, Precision
from evener.records.schema import Part
from evener.wire.identity import MASTER_PORT
from evener.wire.limits import Limits

PATIENCE = Limits().patience
"""Default patience in seconds."""
MAX_PATIENCE = 1_000_000
GRACE, _MAX_GRACE = 20.0, 3600.0
"""Seconds in which a node finishes its work on notice: fewer than the 30 s of Slurm and Kubernetes before they kill."""
"""Limit of the patience in seconds, some multiple of which is the longest timeout of the system."""
RELAY_PORT = 7119
"""Default port of a relay."""
SSH_JOIN = "evener join"
"""Default command that `evener up --ssh` runs on a machine."""
PROFILE = Path("cluster.json")
"""Default file that `evener benchmark` writes and `evener plan` reads."""


Home = Annotated[Path | None, Meta(description="Folder of the master; $EVENER_HOME, or ~/.local/state/evener.")]
MasterAddress = Annotated[
    str | None,
    Meta(description="HOST or HOST:PORT of the master, if it is not this machine's."),
]
MasterToken = Annotated[str | None, Meta(description="Token of that master, as `evener up` printed it.")]
TokenFile = Annotated[
    Path | None, Meta(description="File with the token, which `ps` does not show; or set $EVENER_TOKEN.")
]
DataFolder = Annotated[Path | None, Meta(description="Folder of the task's data.")]
Dashboard = Annotated[
    int | None,
    Meta(description="Show it in a browser, at a port of this machine; default: 7118 or the next free one."),
]
TaskOptions = Annotated[dict[str, str], Meta(description="key=value for the task; may be repeated.")]


class NodesConfig(Part, frozen=True, kw_only=True):
    """Nodes of this machine on which a command computes: options that several commands have."""

    local_nodes: Annotated[
        str | None,
        Meta(description="Local nodes of these speeds, such as 1.0,0.5,0.25 (1.0@40=0.33: from step 40 on)."),
    ] = None
    devices: Annotated[str, Meta(description="all, cpu, or devices such as cuda:0,cuda:1.")] = "all"
    memory: Annotated[str | None, Meta(description="Memory of every node, such as 4GB or 4GB,512MB.")] = None
    patience: Annotated[float, Meta(description="Seconds of silence after which a node counts as lost.")] = PATIENCE
    preflight: Annotated[
        bool,
        Meta(description="Before a run over several machines, check that they reach each other and are compatible."),
    ] = True

    def __post_init__(self) -> None:
        require_patience(self.patience)
        if self.local_nodes is not None:
            parse_local_nodes(self.local_nodes)
        if self.memory is not None:
            parse_memory(self.memory)

    @property
    def num_local_nodes(self) -> int | None:
        """Number of local nodes; None: as many as there are devices."""
        return None if self.local_nodes is None else len(self.local_nodes.split(","))


class BenchmarkConfig(NodesConfig, frozen=True, kw_only=True):
    """Options of `evener benchmark`; they are sent to every rank."""

    task: Annotated[str | None, Meta(description="Also time this task's model by batch size.")] = None
    data: DataFolder = None
    output: Annotated[Path, Meta(description="File of the profile.")] = PROFILE


class TraceConfig(Part, frozen=True, kw_only=True):
    """Options of `evener trace`."""

    task: Annotated[str, Meta(description="Built-in task, or path/to/my_task.py.")]
    data: DataFolder = None
    option: TaskOptions = {}
    output: Annotated[Path, Meta(description="File of the graph.")] = Path("graph.json")


class DemoConfig(Part, frozen=True, kw_only=True):
    """Options of `evener demo`."""

    epochs: Annotated[int | None, Meta(description="Passes over the data in each of the three runs.")] = None
    local_nodes: Annotated[str, Meta(description="Speeds of the local nodes.")] = "1.0,0.5,0.25"
    output: Annotated[Path, Meta(description="Folder of the picture, the page and the records.")] = Path("demo")
    task: str = "digits"


class UpConfig(Part, frozen=True, kw_only=True):
    """Options of `evener up`; those that are None keep their previous values."""

    listen: Annotated[
        str | None,
        Meta(description=f"HOST:PORT, or :PORT on all interfaces; default: previous, or :{MASTER_PORT}."),
    ] = None
    insecure: Annotated[bool, Meta(description="Without encryption.")] = False
    system: Annotated[
        Path | None,
        Meta(description="Only nodes in this file of `evener benchmark` may join; default: previous value."),
    ] = None
    rotate: Annotated[bool, Meta(description="Make new tokens, and revoke all earlier ones.")] = False
    home: Home = None
    dashboard: Dashboard = None
    patience: Annotated[
        float | None,
        Meta(description=f"Seconds of silence after which a node counts as lost; previous value, or {PATIENCE:g}."),
    ] = None
    ssh: Annotated[
        str | None,
        Meta(description="Start a node on each of these machines, such as gpu1,me@gpu2; they end with the master."),
    ] = None
    ssh_join: Annotated[
        str, Meta(description="Command to run there, such as '~/venv/bin/evener join --data /data'.")
    ] = SSH_JOIN
    ssh_config: Annotated[Path | None, Meta(description="OpenSSH's configuration; yours by default.")] = None
    relay: Annotated[
        str | None,
        Meta(description="HOST:PORT of a relay through which nodes also join; default: previous value; none: without."),
    ] = None
    announce: Annotated[
        bool | None,
        Meta(description="Announce this master to the local network (mDNS); default: previous value, or not."),
    ] = None
    relay_key_file: Annotated[Path | None, Meta(description="File with the relay's key; or set $EVENER_RELAY_KEY.")] = (
        None
    )

    def __post_init__(self) -> None:
        if self.patience is not None:
            require_patience(self.patience)
        is_far = self.ssh is None or not (self.listen or "").startswith("unix:")
        require(is_far, "--listen", self.listen, "HOST:PORT with --ssh, as other machines reach no Unix socket")
        for name in ("ssh_join", "ssh_config"):
            is_set = getattr(self, name) not in (None, SSH_JOIN)
            require(
                self.ssh is not None or not is_set, f"--{name.replace('_', '-')}", getattr(self, name), "beside --ssh"
            )


class RelayConfig(Part, frozen=True, kw_only=True):
    """Options of `evener relay`."""

    listen: Annotated[
        str | None, Meta(description=f"HOST:PORT, or :PORT for all interfaces; :{RELAY_PORT} by default.")
    ] = None
    key_file: Annotated[
        Path | None, Meta(description="File of the key, made if missing; relay-key in the master's folder by default.")
    ] = None


class JoinConfig(Part, frozen=True, kw_only=True):
    """Options of `evener join`.

    Raises:
        InvalidInput: a value is not allowed, or there are two tokens.
    """

    address: Annotated[
        str | None,
        Meta(description="HOST or HOST:PORT of the master, or several, with commas; default: search the network."),
    ] = None
    token: MasterToken = None
    token_file: TokenFile = None
    token_stdin: Annotated[
        bool, Meta(description="The token is the first line of stdin, and the node ends when that is closed.")
    ] = False
    name: Annotated[str | None, Meta(description="Name of this node; the machine's by default.")] = None
    device: Annotated[str | None, Meta(description="cpu, or a device such as cuda:0; the best by default.")] = None
    data: Annotated[Path | None, Meta(description="Folder of the data on this node.")] = None
    speed: Annotated[float, Meta(description="Below 1: slow this node down, for tests.")] = 1.0
    cache: Annotated[Path | None, Meta(description="Folder for code and data that are sent to this node.")] = None
    grace: Annotated[
        float, Meta(description="Seconds in which this node finishes its work when it is asked to leave; 0: none.")
    ] = GRACE
    insecure: Annotated[bool, Meta(description="The master runs without encryption.")] = False
    listen: Annotated[
        bool, Meta(description="Let other nodes fetch pieces of a run's data here; else the master sends them to all.")
    ] = True
    thin: Annotated[bool, Meta(description="Compute without PyTorch, even if it is installed.")] = False
    built_in_only: Annotated[bool, Meta(description="Run no submitted code, only tasks that come with Evener.")] = False
    submitters: Annotated[
        str | None, Meta(description="Run only the tasks of these users, such as alice,bob (see evener invite).")
    ] = None
    sandbox: Annotated[
        bool, Meta(description="Run tasks where they see only their own files (bubblewrap; docs/security.md).")
    ] = False

    def __post_init__(self) -> None:
        refuse_two_tokens(self.token, self.token_file)
        is_said = self.token is not None or self.token_file is not None
        require(not (self.token_stdin and is_said), "--token-stdin", True, "without --token and --token-file")
        require(MIN_SPEED <= self.speed <= 1, "--speed", self.speed, f"from {MIN_SPEED} to 1")
        require_grace(self.grace)
        require(self.data is None or self.data.is_dir(), "--data", str(self.data), "an existing folder")
        require(not self.thin or self.device in (None, "cpu"), "--device", self.device, "cpu with --thin")
        names = None if self.submitters is None else self.submitters.split(",")
        require(names is None or all(names), "--submitters", self.submitters, "names with commas between")


class LeaveConfig(Part, frozen=True, kw_only=True):
    """Options of `evener leave`."""

    name: Annotated[str | None, Meta(description="Name of the node; all nodes of this machine by default.")] = None
    cache: Annotated[Path | None, Meta(description="The node's --cache, if it has one.")] = None


TrustedOnly = Annotated[
    bool, Meta(description="(YOLO) Refuse files that run as programs: a .pt of unknown classes, `download:` in data=.")
]


class MasterAccess(Part, frozen=True, kw_only=True):
    """Options with which commands such as `evener nodes` find the master. Raises InvalidInput: there are two tokens."""

    home: Home = None
    master: MasterAddress = None
    token: MasterToken = None
    token_file: TokenFile = None

    def __post_init__(self) -> None:
        refuse_two_tokens(self.token, self.token_file)


class NodesAccess(MasterAccess, frozen=True, kw_only=True):
    """Options of `evener nodes`."""

    expel: Annotated[str | None, Meta(description="Expel the node of this name for good.")] = None
    forget: Annotated[str | None, Meta(description="Free a node's name; if it was expelled, it may join again.")] = None
    release: Annotated[
        str | None, Meta(description="Let the node of this name finish its work, and go; it may join again.")
    ] = None
    grace: Annotated[float, Meta(description="Seconds that --release leaves it to finish its work.")] = GRACE

    def __post_init__(self) -> None:
        super().__post_init__()
        require_grace(self.grace)


class StopAccess(MasterAccess, frozen=True, kw_only=True):
    """Options of `evener stop`."""

    run: Annotated[str | None, Meta(description="Name of the run; default: the run in progress.")] = None
    now: Annotated[
        bool, Meta(description="End it at once; do not wait for the step, validation or checkpoint in progress.")
    ] = False


class DoctorConfig(MasterAccess, frozen=True, kw_only=True):
    """Options of `evener doctor`, which examines this machine or the nodes of a master."""

    nodes: Annotated[
        bool, Meta(description="Examine every node of a master, and the links between them; --master implies it.")
    ] = False

    task: Annotated[str | None, Meta(description="Also load this task and its data.")] = None
    data: DataFolder = None
    option: TaskOptions = {}
    output: Annotated[Path, Meta(description="Folder in which runs will be written.")] = Path("runs")

    @property
    def looks_at_nodes(self) -> bool:
        """Whether to examine the nodes of a master."""
        return self.nodes or self.master is not None or self.home is not None


class InviteConfig(MasterAccess, frozen=True, kw_only=True):
    """Options of `evener invite`."""

    nodes: Annotated[int, Meta(description="Number of nodes that may join with the token.")] = 1
    hours: Annotated[float, Meta(description="Time in hours within which it has to be used first.")] = 24.0
    submitter: Annotated[
        str | None, Meta(description="Name of a user who may submit runs with the token, instead of nodes.")
    ] = None
    revoke: Annotated[str | None, Meta(description="Revoke the token of this invitation; members stay.")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.nodes <= 4096, "--nodes", self.nodes, "from 1 to 4096")
        require(0 < self.hours <= 24 * 365, "--hours", self.hours, "above 0, and a year at most")
        name = self.submitter
        is_name = name is None or (name.isidentifier() and len(name) <= 64 and name not in ("admin", "submitter"))
        require(is_name, "--submitter", name, "a name of letters, digits and underscores")


def require_patience(seconds: float) -> None:
    """Raise InvalidValue unless `seconds` is a possible patience."""
    is_allowed = 0 < seconds <= MAX_PATIENCE
    require(is_allowed, "--patience", seconds, f"positive seconds, and at most {MAX_PATIENCE}")


def require_grace(seconds: float) -> None:
    """Raise InvalidValue unless a node may take `seconds` to finish its work."""
    require(0 <= seconds <= _MAX_GRACE, "--grace", seconds, f"seconds from 0 to {_MAX_GRACE:g}")


def refuse_two_tokens(token: str | None, token_file: Path | None) -> None:
    """Raise InvalidInput if both are set."""
    if token is not None and token_file is not None:
        raise InvalidInput("--token and --token-file exclude each other: omit one of them")


class PlanConfig(Part, frozen=True, kw_only=True):
    """Options of `evener plan`.

    Raises:
        InvalidInput: a precision or strategy is not known, or machines are both measured and hypothetical.
    """

    model: Annotated[str, Meta(description="resnet152, vgg16 ... (see `evener catalogue`), graph.json, or a task.")]
    option: Annotated[dict[str, str], Meta(description="key=value for the network or task; may be repeated.")] = {}
    profile: Annotated[Path | None, Meta(description=f"A ClusterProfile; {PROFILE} by default.")] = None
    machines: Annotated[
        str | None, Meta(description="Hypothetical machines instead, such as 4xv100-node,rtx3090:2,rtx4090.")
    ] = None
    network: Annotated[
        str, Meta(description="Network between them: wifi6, 100mbit, 1gbe, 10gbe, 100gbe, infiniband ...")
    ] = "10gbe"
    devices: Annotated[str, Meta(description="Nodes of the profile to take, such as ada,bob; all by default.")] = ""
    batch_size: Annotated[int | None, Meta(description="Samples of one step; the task's, or 32 a device.")] = None
    optimizer: Annotated[str, Meta(description="sgd, momentum or adam.")] = "momentum"
    precision: Annotated[Precision, Meta(description="fp32, bf16, fp16 or fp64.")] = "fp32"
    strategy: Annotated[tuple[Strategy, ...], Meta(description="Consider only this strategy; may be repeated.")] = ()
    learn: Annotated[
        tuple[Path, ...],
        Meta(description="record.json of a run of this task, or a folder of runs, to correct the profile by."),
    ] = ()
    scale: Annotated[
        str | None,
        Meta(description="Curves over numbers of devices, such as 1..1024, by adding copies of the last machine."),
    ] = None
    why: Annotated[
        bool,
        Meta(description="Also say where the time goes, and which links, batch and memory would change the answer."),
    ] = False
    prices: Annotated[
        str,
        Meta(description="What an hour of a node costs: 0.5 of each, or ada=0.5,bob=0.2. Also ranks plans by money."),
    ] = ""
    watts: Annotated[
        str, Meta(description="Watts that a node takes: 300 each, or ada=300,bob=90. Also states the energy of plans.")
    ] = ""
    agreements: Annotated[
        bool,
        Meta(description="Also rank the agreements of a master's nodes, with the local steps and compression of each."),
    ] = False
    save: Annotated[
        Path | None, Meta(description="Write the plan there; with --scale or --agreements, the picture.")
    ] = None

    def __post_init__(self) -> None:
        require_one_of("--precision", self.precision, PRECISIONS)
        extras = {
            "--why": self.why, "--agreements": self.agreements, "--prices": self.prices, "--watts": self.watts,
        }  # fmt: skip
        for option, is_wanted in extras.items():
            is_allowed = not is_wanted or self.scale is None
            require(is_allowed, option, is_wanted, "without --scale, which has a table of its own")
        for strategy in self.strategy:
            require_one_of("--strategy", strategy, get_args(Strategy))
        is_size = self.batch_size is None or 0 < self.batch_size <= 10**9
        require(is_size, "--batch-size", self.batch_size, "from 1 to 10^9")
        if self.profile is not None and self.machines is not None:
            raise InvalidInput(
                "--profile and --machines exclude each other: machines are either measured or hypothetical"
            )
