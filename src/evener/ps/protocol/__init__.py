"""What master, nodes and commands tell each other: messages, jobs and files that travel. Runs on both sides."""
