"""Tasks that can be named: those that come with Evener, and those in a user's file."""

from evener.tasks.load import BUILT_IN_TASKS, BUILT_IN_THIN_TASKS, has_thin_task, load_task, load_thin_task

__all__ = ["BUILT_IN_TASKS", "BUILT_IN_THIN_TASKS", "has_thin_task", "load_task", "load_thin_task"]
