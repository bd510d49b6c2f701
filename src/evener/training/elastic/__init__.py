"""A run that goes on when nodes leave or come: its loop, what state it holds, and how that is passed on."""
