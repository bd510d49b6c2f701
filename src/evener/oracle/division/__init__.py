"""Divides operations among ranks: layouts of values, windows, rules, moves, weights, bytes. Pure."""
