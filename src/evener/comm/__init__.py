"""Ranks that work together: their process group, what they send (counted), and how they keep their pace."""

from evener.comm.group import Group, Traffic, join_group, leave_group
from evener.comm.pace import Pace, StepTiming

__all__ = ["Group", "Pace", "StepTiming", "Traffic", "join_group", "leave_group"]
