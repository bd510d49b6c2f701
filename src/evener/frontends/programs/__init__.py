"""A training program of the user's own on all nodes: its loop stays, its batches are divided, its gradients are one.

entry, run          what programs and front ends call: `join`, and the `Run` that it returns
batch_training      `BatchTask`: the loop is Evener's, each step is the user's
calling             `evener train` of a task, and `evener.train` in Python
script, options     `evener run`
all others          the inside: parts of batches, draws, optimizers, and the comparison with one process
"""
