"""Training programs as people write them, alone and on uneven nodes: equal, or refused in one sentence."""
