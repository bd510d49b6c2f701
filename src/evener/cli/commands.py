"""The function of each command. Its options are the fields of a struct; it loads what it needs when it is called."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from evener.cli.before import adopt_launcher, loading, passed_options, require_files, require_program, tell
from evener.config.options import (
    BenchmarkConfig,
    DemoConfig,
    DoctorConfig,
    InviteConfig,
    JoinConfig,
    LeaveConfig,
    MasterAccess,
    NodesAccess,
    PlanConfig,
    RelayConfig,
    StopAccess,
    TraceConfig,
    UpConfig,
)
from evener.config.run_config import RunConfig
from evener.data.tasks.load import require_task
from evener.frontends.programs.options import ScriptConfig
from evener.frontends.yolo.overrides import (
    YoloConfig,
    checkpoint_of,
    read_master_overrides,
    read_overrides,
    require_searchable,
    require_ultralytics,
    run_config,
    search_overrides,
    yolo_config,
)
from evener.search.options import TuneConfig
from evener.search.study import require_study


def train(config: RunConfig, as_json: bool) -> None:
    """Train TASK on this machine, as a rank of torchrun, or (with --master or --agreement) on the nodes of a master."""
    if config.agreement is None and not config.has_ranks_on_master:
        adopt_launcher()
    if config.usual:
        tell(f"options: {config.usual}", as_json, quiet=config.quiet)
    if config.is_yolo:
        settings = yolo_config(config).overrides
        if config.agreement or config.has_ranks_on_master:
            read_master_overrides(settings, is_agreed=config.agreement is not None)
        else:
            checkpoint_of(read_overrides(settings))
        require_files(config)
        require_ultralytics()
        with loading(as_json, quiet=config.quiet):
            from evener.frontends.yolo import command

        command.train(config, as_json=as_json)
        return
    require_task(config.task)
    require_files(config)
    if config.agreement is not None:
        with loading(as_json, quiet=config.quiet):
            from evener.commands.train_by_agreement import train_by_agreement

        train_by_agreement(config, as_json=as_json)
    elif config.has_ranks_on_master:
        with loading(as_json, quiet=config.quiet):
            from evener.commands.train_as_ranks import train_as_ranks

        train_as_ranks(config, as_json=as_json)
    else:
        with loading(as_json, quiet=config.quiet):
            from evener.frontends.programs import calling

        calling.train_command(config, as_json=as_json)


def yolo(config: YoloConfig, as_json: bool) -> None:
    """Train a model of Ultralytics: `evener yolo detect train model=yolov8n.pt data=coco8.yaml epochs=100`."""
    adopt_launcher()
    if config.names_master:
        require_files(run_config(config))
    else:
        checkpoint_of(read_overrides(config.overrides))
    require_ultralytics()
    with loading(as_json):
        from evener.frontends.yolo import command

    command.run(config, as_json=as_json)


def run(config: ScriptConfig, as_json: bool) -> None:
    """Run SCRIPT, a program that calls evener.join(), on this machine's nodes or as a rank of torchrun."""
    require_program(config.script)  # before PyTorch is loaded
    adopt_launcher()
    if line := passed_options(config.script, config.arguments, config.__struct_fields__):
        tell(line, as_json=True)
    with loading(as_json=True):  # stdout is the program's
        from evener.frontends.programs import script

    script.run_program(config, as_json=as_json)


def tune(config: TuneConfig, as_json: bool) -> None:
    """Search for the options with which TASK learns best: many trials, on nodes of unequal speed."""
    if config.usual:
        tell(f"options: {config.usual}", as_json)
    if config.is_yolo:
        require_searchable(config)
        if config.output is not None:
            require_study(config.output, resume=config.resume)
        require_ultralytics()
        _require_submitter(config)
        with loading(as_json), redirect_stdout(sys.stderr):  # on which Ultralytics speaks from then on
            from evener.frontends.yolo.command import require_trust

            require_trust(read_overrides(search_overrides(config, {})), trusted_only=config.trusted_only)
            from evener.frontends.yolo import tuning

        tuning.tune(config, as_json=as_json)
        return
    require_task(config.task)
    require_study(config.folder, resume=config.resume)
    _require_submitter(config)
    with loading(as_json):
        from evener.search import command

    command.tune(config, as_json=as_json)


def _require_submitter(config: TuneConfig) -> None:
    """Raise EvenerError if a master is named that would refuse the runs of a search, before much is loaded."""
    if config.is_on_master:
        from evener.commands.up import require_submitter

        require_submitter(
            MasterAccess(home=config.home, master=config.master, token=config.token, token_file=config.token_file)
        )


def plan(config: PlanConfig, as_json: bool) -> None:
    """Say what each way of training MODEL on some machines would cost, and which to take; needs no GPU."""
    with loading(as_json=True, line="planning"):  # stdout is for the plan
        from evener.commands import plan as plan_command

        plan_command.plan(config, as_json=as_json)


def catalogue() -> None:
    """Print the models, machines, cards and networks that `evener plan` knows by name."""
    from evener.commands import plan as plan_command

    plan_command.catalogue()


def benchmark(config: BenchmarkConfig, as_json: bool) -> None:
    """Measure every device and link, and write a ClusterProfile."""
    if config.task is not None:
        require_task(config.task)
    adopt_launcher()
    with loading(as_json):
        from evener.commands import train as commands

    commands.benchmark(config, as_json=as_json)


def trace(config: TraceConfig) -> None:
    """Show the layers of a task's model and what each costs, without computing anything; write a ModelGraph."""
    require_task(config.task)
    with loading(as_json=False):
        from evener.commands import train as commands

    commands.trace(config)


def demo(config: DemoConfig, as_json: bool) -> None:
    """Train digits three ways by turns on uneven local nodes: the best node alone, equal shares, Evener."""
    with loading(as_json):
        from evener.commands import demo as commands

    commands.demo(config, as_json=as_json)


def report(
    records: Annotated[list[Path], typer.Argument(help="One or more record.json, or folders of runs.")],
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write an HTML page with tables and figures of one or several runs."""
    from evener.report.html import write_records
    from evener.training.console import output_file

    write_records([path / "record.json" if path.is_dir() else path for path in records], output_file(output))
    sys.stdout.write(f"wrote {output}\n")


def dashboard(
    runs: Annotated[list[Path] | None, typer.Argument(help="Folders of runs, or a folder of such; runs.")] = None,
    port: Annotated[int, typer.Option(help="Of this machine; 7118, or the next free one.")] = 0,
) -> None:
    """Show runs in a browser, while they go on and when they are over; until Ctrl-C."""
    from evener.commands import dashboard as page

    page.dashboard(runs or [Path("runs")], port)


def doctor(config: DoctorConfig, as_json: bool) -> None:
    """Say what is wrong with this machine, or a master's nodes, and what to do; ends with 2 if a run would fail."""
    if config.task is not None:
        require_task(config.task)
    from evener.commands import doctor as doctor_command

    raise typer.Exit(doctor_command.doctor(config, as_json=as_json))


def init(path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("my_task.py")) -> None:
    """Write a task that trains as it is, to make your own of it, and evener.toml for its usual options."""
    from evener.data.tasks import starter

    starter.write_task(path)
    sys.stdout.write(f"wrote {path}: try `evener train {path} --local-nodes 1,0.5`\n")
    if options := starter.write_options(path.parent):
        sys.stdout.write(f"wrote {options}: for its usual options, none of which is set yet\n")


def version() -> None:
    """Print the versions of Evener and of what it stands on."""
    from evener.system.host import package_versions

    sys.stdout.write(json.dumps(package_versions(), indent=1) + "\n")


def up(config: UpConfig, as_json: bool) -> None:
    """Be a master that nodes join, until `evener down` or Ctrl-C; started again it is the same one."""
    from evener.commands import up as up_command

    up_command.up(config, as_json=as_json)


def relay(config: RelayConfig, as_json: bool) -> None:
    """Pass on encrypted connections between nodes and a master that cannot reach each other, until Ctrl-C."""
    from evener.commands import relay as relay_command

    relay_command.relay(config, as_json=as_json)


def join(config: JoinConfig) -> None:
    """Be a node of the master at ADDRESS, until it says goodbye or Ctrl-C. Needs no PyTorch to join."""
    from evener.commands.join import join as join_master

    join_master(config)


def leave(config: LeaveConfig) -> None:
    """Let the nodes of this machine finish their work, and leave their master."""
    from evener.commands.join import leave as leave_master

    leave_master(config)


def nodes(access: NodesAccess, as_json: bool) -> None:
    """Show the nodes of a master, and the run that goes on."""
    from evener.commands import up as up_command

    up_command.nodes(access, as_json=as_json)


def invite(config: InviteConfig) -> None:
    """Make a token for one node or several, or for a submitter, with an end; or revoke one."""
    from evener.commands import up as up_command

    up_command.invite(config)


def stop(access: StopAccess) -> None:
    """End the run that goes on at a master, from anywhere, with what it has reached; its nodes stay."""
    from evener.commands import up as up_command

    up_command.stop(access)


def down(access: MasterAccess) -> None:
    """End a master's run, its nodes, and the master."""
    from evener.commands import up as up_command

    up_command.down(access)
