"""The work of commands, by subject: from options to printed and written results.

`cli/commands.py` has one function per command and calls the modules here; `run`, `yolo` and `tune` are in `frontends`
and `search`. `train` begins in `frontends/programs/calling.py`, which loads the task, unless it is for an
agreement, a master or YOLO.
"""
