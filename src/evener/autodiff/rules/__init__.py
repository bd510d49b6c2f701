"""THE TABLE: every primitive of differentiation by name. A new operation is a new row; the engine never changes."""

from evener.autodiff.rules.elementwise import ELEMENTWISE
from evener.autodiff.rules.losses import LOSSES
from evener.autodiff.rules.normalisation import NORMALISATION
from evener.autodiff.rules.products import PRODUCTS
from evener.autodiff.rules.reductions import REDUCTIONS
from evener.autodiff.rules.rule import Rule
from evener.autodiff.rules.shapes import SHAPES

RULES: dict[str, Rule] = {**ELEMENTWISE, **SHAPES, **REDUCTIONS, **PRODUCTS, **NORMALISATION, **LOSSES}

__all__ = ["RULES", "Rule"]
