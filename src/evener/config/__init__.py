"""What a user asks for: the options of a run, field by field, where they come from, and which do not go together."""
