"""The training of every rank, from joining to the record."""
