"""THE TABLE: every primitive of differentiation by name. A new operation is a new row; the engine never changes."""

from evener.autodiff.graph import Rule
from evener.autodiff.rules.arrays import ELEMENTWISE, REDUCTIONS, SHAPES
from evener.autodiff.rules.layers import LOSSES, NORMALISATION, PRODUCTS

RULES: dict[str, Rule] = {**ELEMENTWISE, **SHAPES, **REDUCTIONS, **PRODUCTS, **NORMALISATION, **LOSSES}
