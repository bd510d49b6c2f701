"""From an order to the task of a run in PyTorch, and its settings."""

from __future__ import annotations

from pathlib import Path

from evener.run.order import Order
from evener.run.settings import Settings
from evener.task import Task
from evener.tasks.load import load_task


def load(order: Order) -> tuple[Task, Settings]:
    """The task that was asked for, and its settings. Raises InvalidInput if anything is wrong with them."""
    task = load_task(order.task, Path(order.data_dir) if order.data_dir else None, order.options)
    return task, order.settings(task)
