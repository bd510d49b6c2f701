"""What Huang et al. (2019) measured with GPipe: tables 1, 2 and 3 of the paper."""

from __future__ import annotations

NAIVE = 0
"""Stands for one accelerator without re-materialisation, where a number of stages is meant."""

PARAMETERS = {
    "AmoebaNet-D": {NAIVE: 82e6, 1: 318e6, 2: 542e6, 4: 1.05e9, 8: 1.8e9},
    "Transformer": {NAIVE: 282.2e6, 1: 785.8e6, 8: 5.3e9, 32: 21.0e9, 128: 83.9e9},
}
"""Table 1: of the largest model that trains, by number of accelerators, of 8 GB and of 16 GB."""

ACTIVATIONS = {"AmoebaNet-D": {NAIVE: 6.26e9, 1: 3.46e9}}
"""Table 1: bytes of activations at their peak."""

THROUGHPUT = {
    "AmoebaNet-D": {
        (2, 1): 1.0, (4, 1): 1.13, (8, 1): 1.38,
        (2, 4): 1.07, (4, 4): 1.26, (8, 4): 1.72,
        (2, 32): 1.21, (4, 32): 1.84, (8, 32): 3.48,
    },
    "Transformer": {
        (2, 1): 1.0, (4, 1): 1.07, (8, 1): 1.3,
        (2, 4): 1.7, (4, 4): 3.2, (8, 4): 4.8,
        (2, 32): 1.8, (4, 32): 3.4, (8, 32): 6.3,
    },
}  # fmt: skip
"""Table 2: by (stages, micro-batches), relative to two stages and one micro-batch."""

WITHOUT_INTERCONNECT = {
    "AmoebaNet-D": {2: 1.0, 4: 1.7, 8: 2.7},
    "Transformer": {2: 1.0, 4: 1.8, 8: 3.3},
}
"""Table 3: by stages, 32 micro-batches, on GPUs whose tensors travel through the host; relative to two stages."""
