"""A training program of the user's own on all nodes: its loop stays, its batches are divided, its gradients are one."""
