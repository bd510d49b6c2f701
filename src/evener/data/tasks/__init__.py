"""Tasks that can be named: those that come with Evener, and those in a user's file."""
