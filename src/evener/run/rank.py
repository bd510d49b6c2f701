"""The whole way of a run on one page: join -> plan -> build -> train -> record.

`train_rank` is what every rank runs, whoever started it. All decisions are made on every rank from the same numbers, so
that no rank has to be sent the plan.
"""

from __future__ import annotations

import time

from evener.comm.group import leave_group
from evener.launch.rank_environment import RankEnvironment
from evener.run.config import RunConfig
from evener.run.context import join_run
from evener.run.loop import train
from evener.run.planning import make_plan
from evener.run.records import write_results
from evener.run.training import make_training


def train_rank(env: RankEnvironment, config: RunConfig) -> None:
    """One rank's whole way; the leader emits plan, steps and record through the env."""
    context = join_run(env, config)
    plan = make_plan(context)
    among = context.of_plan(plan)
    if among is None:
        return
    training = make_training(among, plan)
    if training.group.is_leader:
        env.notify(training.plan)
    startup = time.time() - among.config.started
    history = train(training)
    write_results(training, history, startup)
    training.group.barrier()
    leave_group()
