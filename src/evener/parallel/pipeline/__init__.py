"""Pipeline parallelism: a model cut into stages, batches through them in micro-batches."""

from evener.parallel.pipeline.pipeline import Pipeline
from evener.parallel.pipeline.timeline import Event, Timeline

__all__ = ["Event", "Pipeline", "Timeline"]
