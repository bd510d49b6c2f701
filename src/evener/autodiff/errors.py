"""The errors of this library; each message has the rule, the offending value, and what to do.

AutodiffError
|- InvalidOperation  (ValueError)      an operation got shapes, types or arguments that it does not support
|- TensorExpired     (RuntimeError)    a tensor was used after its arena had been reset
|- GraphFreed        (RuntimeError)    backward was called again after it had freed the graph
|- ParameterChanged  (RuntimeError)    a parameter was changed between forward and backward
|- NoGradient        (RuntimeError)    backward was called for a tensor without a gradient
|- StateMismatch     (ValueError)      a state does not fit the model or optimizer that loads it
`- WrongGradient     (AssertionError)  a rule's gradient differs from the finite difference
"""


class AutodiffError(Exception):
    """Base class of the errors of the thin engine."""


class InvalidOperation(AutodiffError, ValueError):
    """An operation got shapes, types or arguments that it does not support; names operation and shapes."""


class TensorExpired(AutodiffError, RuntimeError):
    """A tensor was used after its arena had been reset; says how to keep a value."""


class GraphFreed(AutodiffError, RuntimeError):
    """Backward was called again after it had freed the graph; says how to keep it."""


class ParameterChanged(AutodiffError, RuntimeError):
    """A parameter was changed between forward and backward; the gradient would belong to neither value."""


class NoGradient(AutodiffError, RuntimeError):
    """Backward was called for a tensor without a gradient."""


class StateMismatch(AutodiffError, ValueError):
    """A state does not fit the model or optimizer that loads it; names missing, unknown and misshapen entries."""


class WrongGradient(AutodiffError, AssertionError):
    """A rule's gradient differs from the finite difference; names input, element and both values."""


def require(condition: bool, sentence: str, *values: object) -> None:
    """Raise InvalidOperation with `sentence`, its braces filled with `values`, unless `condition` holds.

    The sentence is formatted only on failure, because these checks run in every step.
    """
    if not condition:
        raise InvalidOperation(sentence.format(*values))
