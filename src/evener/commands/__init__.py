"""The commands, one file each: from options to printed and written results."""
