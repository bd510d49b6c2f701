"""The star plane: a master, and nodes that connect out to it and may come and go at any step."""
