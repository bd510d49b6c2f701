"""One file for each command: from what was asked for to what is printed and written."""
