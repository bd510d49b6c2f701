"""Pipeline parallelism: a model cut into stages, batches through them in micro-batches."""
