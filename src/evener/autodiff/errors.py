"""Every error that this library raises on purpose: one sentence that says the rule, what broke it, and what to do.

AutodiffError
|- InvalidOperation  (ValueError)      an operation was given shapes, types or arguments that it cannot take
|- TensorExpired     (RuntimeError)    a tensor was used after its arena had been reset
|- GraphFreed        (RuntimeError)    a graph was to be walked again after backward had freed it
|- ParameterChanged  (RuntimeError)    a parameter was changed between forward and backward
|- NoGradient        (RuntimeError)    backward was asked of something that has no gradient
|- StateMismatch     (ValueError)      a state does not fit the model or optimiser that should load it
`- WrongGradient     (AssertionError)  a rule's gradient differs from the finite difference
"""


class AutodiffError(Exception):
    """Base of all errors below."""


class InvalidOperation(AutodiffError, ValueError):
    """An operation was given shapes, types or arguments that it cannot take; names operation and shapes."""


class TensorExpired(AutodiffError, RuntimeError):
    """A tensor was used after its arena had been reset; says how to keep a value."""


class GraphFreed(AutodiffError, RuntimeError):
    """A graph was to be walked again after backward had freed it; says how to keep it."""


class ParameterChanged(AutodiffError, RuntimeError):
    """A parameter was changed between forward and backward; the gradient would belong to neither value."""


class NoGradient(AutodiffError, RuntimeError):
    """Backward was asked of something that has no gradient."""


class StateMismatch(AutodiffError, ValueError):
    """A state does not fit the model or optimiser that should load it; names what is missing, unknown or misshapen."""


class WrongGradient(AutodiffError, AssertionError):
    """A rule's gradient differs from the finite difference; names input, element and both values."""


def require(condition: bool, sentence: str, *values: object) -> None:
    """Raise InvalidOperation with `sentence`, its braces filled with `values`, unless `condition` holds.

    The sentence is put together only when it is needed: these checks run in every step.
    """
    if not condition:
        raise InvalidOperation(sentence.format(*values))
