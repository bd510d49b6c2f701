"""A plan and a module in, this rank's module out: same outputs, gradients and weights as one process."""
