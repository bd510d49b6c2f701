"""The live page of a run: events.jsonl -> what a browser on this machine sees, now and as long as the run lasts."""
