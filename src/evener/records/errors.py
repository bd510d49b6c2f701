"""All errors that Evener raises on purpose: one sentence for the user, one exit code for the shell.

EvenerError                 1
|- InvalidInput             2   a wrong argument, file or task; nothing was started
|  |- InvalidValue              a field has a value that is not allowed
|  |- InvalidFile               a file has wrong contents
|  |- NotExact                the ranks would not train the same as one process
|  |  `- OutOfStep            ranks have reached different calls, and would wait for each other for ever
|  |- TaskCannot               a Task cannot have a feature, whatever the strategy; names the front end that can
|  |- FolderInUse            another run writes into the folder
|  |- MissingFile               a file or data set is missing; says what to fetch from where
|  `- MissingExtra              an optional dependency is not installed; says how to install it
|- TrainingFailed           3   the task itself failed: its code raised, or its loss is not finite
|  |- NonFiniteLoss
|  `- NoUsableNode             no node can take part in a run; says why each cannot
|- CannotWrite              1   the disk is full or gone; says what remains of a run
|- NodeLost                 4   a node died, stopped responding, or cannot be reached
|  |- LineCut               4   a node does not reach another one that all others reach
|  `- DeviceLost            4   a node's GPU, or another accelerator, is lost or hangs
|- DoesNotFit               5   no division of the work fits the memory
|- NotNeeded                6   a node would slow a run down; the run continues without it
`- Interrupted            130   the user (or the scheduler) asked to stop; the checkpoint is written
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from math import nan
from pathlib import Path
from textwrap import shorten
from typing import ClassVar, TypeGuard


class EvenerError(Exception):
    """Base of all errors below; `str()` of it is one sentence without a traceback.

    Class and fields are kept when an error is sent to another process (`error_kind.py`); a field is an annotated
    attribute with a default.
    """

    exit_code: ClassVar[int] = 1


class InvalidInput(EvenerError):
    """Raised if a request cannot be fulfilled; nothing was started."""

    exit_code: ClassVar[int] = 2


class InvalidValue(InvalidInput, ValueError):
    """Raised if a field has a value that is not allowed.

    Args:
        field: name of the field or option, as the user writes it.
        value: offending value.
        allowed: description of the allowed values.
        advice: text to append.
    """

    field: str = ""
    value: object = None
    allowed: str = ""

    def __init__(self, field: str, value: object, allowed: str, advice: str = "") -> None:
        super().__init__(f"{field} must be {allowed}, got {value!r}{advice}")
        self.field, self.value, self.allowed = field, value, allowed


class InvalidFile(InvalidInput):
    """Raised if a file has wrong contents; names file, field, value and what is allowed."""


class NotExact(InvalidInput):
    """Raised if the ranks would not train the same as one process; says what differs, and by how much."""


class TaskCannot(InvalidInput):
    """Raised if a Task cannot have a feature with any strategy; says which front end supports it."""


class NeedsRanks(NotExact):
    """Raised if nodes on leases would not train the same as one process, but ranks that work together may.

    Args:
        reason: clause that says what such nodes cannot do.
        advice: advice for the user.
    """

    reason: str = ""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason}; {advice}")
        self.reason = reason


class UnknownOptimizer(InvalidInput):
    """Raised if the server has no optimizer that is equivalent to the task's.

    Args:
        what: name of the optimizer, or of its option that the server lacks.
    """

    what: str = ""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the server supports SGD, Adam and AdamW, but not {what}; "
            "with --agreement average or diloco every node uses the task's own optimizer"
        )
        self.what = what


class OutOfStep(NotExact):
    """Raised if nodes have reached different calls, so that each would wait for the other for ever.

    Args:
        calls: call that each of two nodes has reached, by the name of the node.
        advice: what the program has to do instead.
    """

    calls: dict[str, str] = {}

    def __init__(self, calls: Mapping[str, str], advice: str) -> None:
        places = ", ".join(f"node {node} has reached {call}" for node, call in calls.items())
        super().__init__(f"the nodes have reached different calls: {places}; {advice}")
        self.calls = dict(calls)


class FolderInUse(InvalidInput):
    """Raised if another process writes into the folder of a run.

    Args:
        folder: folder of the run.
        holder: process that writes there, as far as it is known: `process 7 on pc1`.
    """

    folder: str = ""
    holder: str = ""

    def __init__(self, folder: Path, holder: str) -> None:
        self.folder, self.holder = str(folder), holder
        super().__init__(
            f"{folder} is in use by another run ({holder or 'of an unknown process'}): "
            "wait for its end, or name another folder"
        )


class MissingFile(InvalidInput):
    """Raised if a file, folder or data set is missing; the sentence says what to do."""


class MissingExtra(InvalidInput):
    """Raised if an optional dependency is not installed; the sentence says how to install it."""


class TrainingFailed(EvenerError):
    """Raised if the task's own code failed, or its results cannot be trained on."""

    exit_code: ClassVar[int] = 3


class NonFiniteLoss(TrainingFailed):
    """Raised if a loss is NaN or infinite.

    Args:
        node: name of the node on which it arose.
        step: optimizer step, from 1.
        loss: value of the loss.
    """

    node: str = ""
    step: int = 0
    loss: float = nan

    def __init__(self, node: str, step: int, loss: float, advice: str = "") -> None:
        super().__init__(f"the loss on node {node} at step {step} is {loss}{advice}")
        self.node, self.step, self.loss = node, step, loss


class NoUsableNode(TrainingFailed):
    """Raised if no node of a master can take part in a run; says why each of them cannot."""


class CannotWrite(EvenerError):
    """Raised if a result could not be written, since the disk is full or gone.

    Args:
        path: path of the result.
        error: error of the system.
        advice: what remains nevertheless.
    """

    def __init__(self, path: Path, error: Exception, advice: str = "") -> None:
        why = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        super().__init__(f"cannot write {path}: {why}{advice}")


class NodeLost(EvenerError):
    """Raised if a node died, stopped responding or cannot be reached.

    Most places that raise it only report the decision of another one. Which class decides depends on the kind of run:
    see "Who declares a node lost" in docs/architecture.md.

    Args:
        sentence: sentence that names node, rank and step.
        nodes: names of the lost nodes; empty where the process that raises this does not know them.
    """

    exit_code: ClassVar[int] = 4
    nodes: tuple[str, ...] = ()

    def __init__(self, sentence: str, nodes: Iterable[str] = ()) -> None:
        super().__init__(sentence)
        self.nodes = tuple(nodes)


class LineCut(NodeLost):
    """A node does not reach another one that all others reach, and gives way: the others can go on without it."""


class DeviceLost(NodeLost):
    """The accelerator of a node no longer works. The process that raises this is on that node."""


class DoesNotFit(EvenerError):
    """Raised if no division of the work fits the memory of the nodes; says which batch would."""

    exit_code: ClassVar[int] = 5


class NotNeeded(EvenerError):
    """Raised if adding the node would slow training down; carries the prediction."""

    exit_code: ClassVar[int] = 6


class Interrupted(EvenerError):
    """Raised if the user or the scheduler asked to stop; says where the run can be resumed from."""

    exit_code: ClassVar[int] = 130


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raise InvalidValue unless `condition` holds.

    Raises:
        InvalidValue: naming `field`, `value` and what is `allowed`.
    """
    if not condition:
        raise InvalidValue(field, value, allowed)


def require_positive(owner: object, *fields: str) -> None:
    """Raise InvalidValue unless these fields of `owner` are positive."""
    for field in fields:
        require(getattr(owner, field) > 0, field, getattr(owner, field), "positive")


def require_not_negative(owner: object, *fields: str) -> None:
    """Raise InvalidValue unless these fields of `owner` are zero or more."""
    for field in fields:
        require(getattr(owner, field) >= 0, field, getattr(owner, field), "zero or more")


def require_one_of(field: str, value: str, choices: Iterable[str]) -> None:
    """Raise InvalidValue, with a suggestion, unless `value` is one of `choices`."""
    known = list(choices)
    if value not in known:
        raise InvalidValue(field, value, f"one of {', '.join(known)}", nearest(value, known))


def nearest(name: str, known: Iterable[str], *, similarity: float = 0.6) -> str:
    """Return `, did you mean 'x'?` if one of `known` is similar to `name`, else nothing."""
    import difflib  # only needed after an error

    match = difflib.get_close_matches(name, list(known), n=1, cutoff=similarity)
    return f", did you mean {match[0]!r}?" if match else ""


def explain(error: BaseException) -> tuple[str, str]:
    """Return sentence and traceback of an error; the traceback is empty where the sentence is enough."""
    if isinstance(error, EvenerError):
        return str(error), ""
    if isinstance(error, KeyboardInterrupt):
        return "stopped before the first step", ""
    if is_of_the_disk(error):
        return f"cannot write {error.filename or 'a file'}: {error.strerror}", ""
    if (refusal := system_refusal(error)) and not user_frame(error):
        return refusal, ""
    if refusal := pytorch_refusal(error):
        return refusal, ""
    return f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a command that ends with `error`."""
    if isinstance(error, EvenerError):
        return error.exit_code
    return Interrupted.exit_code if isinstance(error, KeyboardInterrupt) else EvenerError.exit_code


_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def is_of_the_disk(error: BaseException) -> TypeGuard[OSError]:
    """Return whether the error means that a disk is full, or cannot be written to."""
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS


_OF_THE_SYSTEM = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENAMETOOLONG)


def system_refusal(error: BaseException) -> str:
    """Return what the system refuses (files, rights, memory, processes) and the remedy; empty for other errors."""
    if not isinstance(error, OSError) or error.errno not in _OF_THE_SYSTEM:
        return ""
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{what}: allow more, such as by `ulimit -n 4096`"
    return f"{what}: this user lacks the right, or a limit of the system is reached"


def pytorch_refusal(error: BaseException) -> str:
    """Return why PyTorch, which is installed, cannot be loaded, and the remedy; empty for other errors."""
    if "torch" in sys.modules or isinstance(error, ModuleNotFoundError):
        return ""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
    if not any(file.endswith(os.path.join("", "torch", "__init__.py")) for file in files):
        return ""
    remedy = "give this process more memory" if isinstance(error, ImportError) else "correct this in the environment"
    return f"PyTorch cannot be loaded: {words_of(error)}; {remedy}, or install PyTorch again"


def end_process(error: EvenerError) -> None:
    """Print `error` and end this process at once, in a process whose errors no other one reports."""
    os.write(2, f"evener: {error}\n".encode())
    os._exit(error.exit_code)


def first_line(error: BaseException) -> str:
    """Return the first line of the message of `error`; its class if the message is empty."""
    return text_of(error).partition("\n")[0] or type(error).__name__


def text_of(error: BaseException) -> str:
    """Return the message of `error`; empty if its class, which may be the user's, cannot make one."""
    try:
        return str(error).strip()
    except Exception:
        return ""


_received_folders: set[Path] = set()
_IN_THE_MODEL = "in the model at "
_CALLED = "in the task's "
_PASSED_ON = "Original Traceback (most recent call last):"
"""Text that PyTorch puts into the message of an error of a data loader's process."""
_MODULE_FILE = os.path.join("torch", "nn", "modules", "module.py")
_MAX_LENGTH = 600


def is_users(filename: str) -> bool:
    """Return whether the code of a file belongs neither to Evener nor to a library."""
    return not filename.startswith(_library_folders())


def name_below(folder: Path) -> None:
    """Have errors in the files of `folder`, which came from another machine, named by their paths below it."""
    _received_folders.add(folder.resolve())


def short_path(path: Path) -> Path:
    """Return the path below a folder that was received, or below the current folder; `path` itself if it is in none."""
    folders = [folder for folder in (*_received_folders, Path.cwd()) if path.is_relative_to(folder)]
    return path.relative_to(folders[0]) if folders else path


def file_line(filename: str, line: int | None, code: str = "") -> str:
    """Return a place in a file: its path, relative to the current folder if possible, line, and shortened code."""
    return f"{short_path(Path(filename))}, line {line}" + (
        f" (`{shorten(code, 80, placeholder=' ...')}`)" if code else ""
    )


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the frame in the user's own files where `error` arose; None if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return frames[-1] if frames else None


def note_place(error: BaseException, place: str) -> None:
    """Add to `error` the place in the model where it arose; an earlier note, from further inside, stays."""
    is_relayed = isinstance(error, EvenerError) and not isinstance(
        error, InvalidInput
    )  # from another rank, or a signal
    if not is_relayed and not is_noted(error):
        error.add_note(f"{_IN_THE_MODEL}{place}")


def note_call(error: BaseException, call: str) -> None:
    """Add to `error` the user's function that raised it, or called the library that did; the first note stays."""
    if not isinstance(error, EvenerError) and not _noted(error, _CALLED):
        error.add_note(f"{_CALLED}{call}")


@contextmanager
def noting(call: str) -> Iterator[None]:
    """Add the user's `call` to every error that arises inside; see `note_call`."""
    try:
        yield
    except Exception as error:
        note_call(error, call)
        raise


def is_noted(error: BaseException) -> bool:
    """Return whether the error arose in an operation of the model, by `note_place`."""
    return bool(_noted(error))


def place_of(error: BaseException) -> str:
    """Return where in the model, or in the user's files or functions, `error` arose, in brackets; empty if unknown."""
    if place := _noted(error):
        return f" ({place})"
    frame = user_frame(error)
    places = [] if frame is None else [f"in {frame.name}, {file_line(frame.filename, frame.lineno)}"]
    note = _noted(error, _CALLED) or _passed_on(error)[1]
    places += [note or ("" if places else _module_of(error))]
    known = ", ".join(filter(None, places))
    return f" ({known})" if known else ""


def ended_by_itself(error: SystemExit) -> TrainingFailed:
    """Return the error of a user's code that calls sys.exit(), which leaves no result for any exit code."""
    return TrainingFailed(f"the program ended itself by sys.exit({error.code!r}){place_of(error)}")


def words_of(error: BaseException) -> str:
    """Return class and message of `error` on one line; of an error in a data loader's process, the original ones."""
    text = text_of(error)
    message = _passed_on(error)[0] or (f"{type(error).__name__}: {text}" if text else type(error).__name__)
    return shorten(message, _MAX_LENGTH, placeholder=" ...")


def _passed_on(error: BaseException) -> tuple[str, str]:
    """Return the message of an error of a data loader's process, and its note; both empty for another error."""
    if not error.args or _PASSED_ON not in (text := str(error.args[0])):
        return "", ""
    lines = text.strip().splitlines()
    notes = [line for line in lines if line.startswith(_CALLED)]
    messages = [line for line in lines if line[:1].strip() and not line.startswith((_CALLED, _PASSED_ON, "Caught "))]
    return messages[-1] if messages else lines[0], notes[0] if notes else "in a process that loads data"


def _noted(error: BaseException, kind: str = _IN_THE_MODEL) -> str:
    return next((note for note in getattr(error, "__notes__", ()) if note.startswith(kind)), "")


def _module_of(error: BaseException) -> str:
    """Return the innermost PyTorch module whose call raised `error`, for a model of PyTorch's own modules."""
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == "_call_impl" and code.co_filename.endswith(_MODULE_FILE):
            place = f"in {type(trace.tb_frame.f_locals.get('self')).__name__} of the model"
        trace = trace.tb_next
    return place


@cache
def _library_folders() -> tuple[str, ...]:
    import sysconfig  # slow to import, and only needed after an error

    return (str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "purelib")), "<")
