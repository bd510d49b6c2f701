"""THE TABLE: every primitive of differentiation by name. A new operation is a new row; the engine never changes."""

from evener.autodiff.rules.elementwise import ELEMENTWISE
from evener.autodiff.rules.layers import LOSSES, NORMALISATION, PRODUCTS
from evener.autodiff.rules.rule import Rule
from evener.autodiff.rules.shapes import REDUCTIONS, SHAPES

RULES: dict[str, Rule] = {**ELEMENTWISE, **SHAPES, **REDUCTIONS, **PRODUCTS, **NORMALISATION, **LOSSES}

__all__ = ["RULES", "Rule"]
