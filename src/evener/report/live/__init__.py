"""The live page of a run: it reads events.jsonl and shows the run in a browser on this machine."""
