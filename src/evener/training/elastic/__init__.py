"""Elastic runs, which continue when nodes leave or join: loop, state, and state transfer."""
