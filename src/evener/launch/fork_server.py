"""Loaded by a fork server, to end with the process that started it, and to have what it forks end with it.

The kernel takes the thread that started a process for its parent, so a server that is started by a thread other than
the main one does without this: it ends when it finds its pipe closed.
"""

from __future__ import annotations

from evener.system.process_exit import kill_forks_with_parent, kill_with_parent

kill_with_parent()
kill_forks_with_parent()
