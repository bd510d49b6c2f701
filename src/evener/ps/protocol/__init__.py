"""Messages, jobs and files that master, nodes and commands exchange; all sides import this package."""
