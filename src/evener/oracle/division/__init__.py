"""How operations are divided among ranks: layouts of values, windows, rules, moves, weights, bytes. Pure."""
