"""From the command to the record: each command, and what every rank does for it."""
