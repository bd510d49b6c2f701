"""Options of commands, field by field: their sources, values and conflicts."""
