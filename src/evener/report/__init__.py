"""Records -> tables for the terminal, figures, one HTML page, TensorBoard scalars. Reads the nouns, changes nothing."""

from evener.report.bars import comparison_figure, ideal_samples_per_second, phases_figure, plan_figure
from evener.report.canvas import png, require_matplotlib
from evener.report.figures import learning_figure, throughput_figure
from evener.report.graph_table import layers_table
from evener.report.html import write_page
from evener.report.keys import summary
from evener.report.profile_tables import links_table, profile_table, timing_table
from evener.report.tables import comparison_table, plan_table, predicted_table, record_table
from evener.report.tensorboard import ScalarWriter, open_scalars
from evener.report.text import human_bytes, human_count, human_seconds, percent
from evener.report.timeline import timeline_figure

__all__ = [
    "ScalarWriter",
    "comparison_figure",
    "comparison_table",
    "human_bytes",
    "human_count",
    "human_seconds",
    "ideal_samples_per_second",
    "layers_table",
    "learning_figure",
    "links_table",
    "open_scalars",
    "percent",
    "phases_figure",
    "plan_figure",
    "plan_table",
    "png",
    "predicted_table",
    "profile_table",
    "record_table",
    "require_matplotlib",
    "summary",
    "throughput_figure",
    "timeline_figure",
    "timing_table",
    "write_page",
]
