"""What a way to train costs: seconds, bytes sent and memory of a step, from a graph and a profile. Pure."""
