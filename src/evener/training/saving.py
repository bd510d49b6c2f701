"""The checkpoints of a rank's run: resuming from the last one, and saving the next.

step = saving.resume(epochs, steps)      # 0, or the step of the last checkpoint, which is loaded
with saving.writing():
    ...
    if saving.is_due(step):
        saving.save(step)               # the leader copies and has it written, all go on
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import TracebackType

import torch
from msgspec.structs import replace
from safetensors import SafetensorError
from torch.optim.lr_scheduler import LRScheduler

from evener.comm.group import Group
from evener.config.run_config import RunConfig
from evener.records.errors import Interrupted, InvalidInput, TrainingFailed, first_line
from evener.records.record import Event
from evener.training.attributes import Attributes
from evener.training.checkpoint import (
    Checkpoint,
    Checkpoints,
    CheckpointState,
    WholeModel,
    WholeOptimizer,
    refuse_other_run,
    revived,
    words_of_unsaved,
    write_weights,
)
from evener.training.checkpoint_folder import end_of_run, refuse_checkpoints


class Saving:
    """Saving and resuming of one rank's training. All ranks make the same calls.

    Args:
        config: says where and when to save, and whether to resume.
        group: the ranks.
        model: whose weights are saved.
        optimizer: whose state is saved.
        scheduler: of the learning rate.
        scaler: of the loss.
        attributes: of the model, the loss and the optimizer, which `state` returns and which are restored.
        state: (step) -> the part of a checkpoint after it that is not tensors.
        emit: takes events.
    """

    def __init__(
        self,
        config: RunConfig,
        group: Group,
        *,
        model: WholeModel,
        optimizer: WholeOptimizer,
        scheduler: LRScheduler | None,
        scaler: torch.amp.GradScaler,
        attributes: Attributes,
        state: Callable[[int], CheckpointState],
        emit: Callable[[Event], None],
    ) -> None:
        self._attributes = attributes
        self._config, self._group, self._state, self._emit = config, group, state, emit
        self._model, self._optimizer, self._scheduler, self._scaler = model, optimizer, scheduler, scaler
        self._checkpoints = Checkpoints(config.checkpoint_folder)
        self._writer = CheckpointWriter(self._checkpoints)
        self._saved_at, self._is_told = time.monotonic(), False

    def rebuild(self, model: WholeModel, optimizer: WholeOptimizer, scheduler: LRScheduler | None) -> None:
        """Save these objects from now on."""
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler

    def resume(self, epochs: int, steps_per_epoch: int) -> int:
        """Load the checkpoint to resume from, if any; return the last step that is done.

        Args:
            epochs: of the whole run.
            steps_per_epoch: of the run.

        Raises:
            InvalidInput: the folder holds checkpoints of another or a longer run, or the ranks see different ones.
            InvalidInput: a checkpoint cannot hold the state of the optimizer or of the schedule.
            MissingFile: there is no checkpoint to resume from.
            InvalidFile: it is damaged, or of another model.
        """
        self._require_plain()
        if not self._config.resume:
            refuse_checkpoints(self._checkpoints.folder)
            return 0
        self._set_aside_damaged()
        folder, state = self._checkpoints.latest()
        self._refuse_different_checkpoints(state.step)
        refuse_other_run(state, self._state(state.step), folder)
        end = end_of_run(state.step, epochs, steps_per_epoch)
        self._checkpoints.load(folder, state, self._model, self._optimizer, self._scheduler, self._scaler)
        self._attributes.restore(revived(state.attributes))
        self._emit(
            Event(step=state.step, kind="resumed", message=f"resumed after step {state.step} from {folder}{end}")
        )
        return state.step

    def _require_plain(self) -> None:
        optimizer = self._optimizer.gather()
        if self._group.is_leader:
            try:
                Checkpoint.of(self._state(0), {}, optimizer, self._scheduler, self._scaler)
            except TrainingFailed as error:
                raise InvalidInput(str(error)) from error

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write checkpoints inside the block; wait for all of them at its end."""
        with self._writer:
            yield
            self.settle()

    def settle(self) -> None:
        """Wait until all checkpoints are written, and emit their events."""
        self._emit_all(self._writer.wait())

    def tell(self) -> None:
        """Emit events of checkpoints that were written meanwhile."""
        self._emit_all(self._writer.finished())

    def is_due(self, step: int) -> bool:
        """Return whether the options request a checkpoint after `step`."""
        every = self._config.checkpoint_steps
        return every is not None and step % every == 0

    def is_time(self) -> bool:
        """Return whether a checkpoint is due by the leader's clock."""
        seconds = self._config.checkpoint_seconds
        return self._group.is_leader and seconds is not None and time.monotonic() - self._saved_at >= seconds

    def save(self, step: int) -> None:
        """Save after `step`: the leader copies the state and writes it in the background; the others continue."""
        weights, optimizer = self._model.gather_weights(), self._optimizer.gather()
        if self._group.is_leader:
            state = self._state(step)
            if state.unsaved and not self._is_told:
                message = f"of this checkpoint is not possible: {words_of_unsaved(state.unsaved)}"
                self._emit(Event(step=step, kind="resuming", message=message))
                self._is_told = True
            self._writer.submit(Checkpoint.of(state, weights, optimizer, self._scheduler, self._scaler))
        self._saved_at = time.monotonic()

    def stop(self, step: int) -> None:
        """Save after `step`, and end the run, as a rank was asked to stop. Raises Interrupted."""
        if self._config.keeps_checkpoints:
            self.save(step)
            self.settle()
            advice = f"; go on with --resume --checkpoint {self._config.checkpoint_folder}"
        else:
            advice, weights = "", self._model.gather_weights()
            if self._group.is_leader:
                write_weights(weights, self._config.folder)
        self._emit(Event(step=step, kind="interrupted", message=f"asked to stop after step {step}"))
        self._group.barrier()
        raise Interrupted(f"stopped after step {step} as asked{advice}")

    def last_good(self) -> str:
        """Return the end of an error message that names the last good checkpoint."""
        self.settle()
        is_nothing = self._checkpoints.is_empty or not self._config.keeps_checkpoints
        return "" if is_nothing else f"; the last good checkpoint is {self._checkpoints.latest()[0]}"

    def _set_aside_damaged(self) -> None:
        """Have the leader rename damaged checkpoints, before any rank reads one."""
        for folder in self._checkpoints.set_aside_damaged() if self._group.is_leader else ():
            self._emit(Event(step=0, kind="damaged checkpoint", message=f"it is called {folder} now"))
        self._group.barrier()

    def _refuse_different_checkpoints(self, step: int) -> None:
        """Raise InvalidInput on every rank if the ranks do not see the same checkpoint."""
        group = self._group
        steps = [int(row) for row in group.all_gather_bytes(str(step).encode())]
        if len(set(steps)) > 1:
            seen = ", ".join(f"{node} step {s}" for node, s in zip(group.nodes, steps, strict=True))
            raise InvalidInput(
                f"the nodes see different checkpoints ({seen}): {self._checkpoints.folder} must be shared"
            )

    def _emit_all(self, events: Sequence[Event]) -> None:
        for event in events:
            is_elsewhere = event.kind == "checkpoint" and not self._config.keeps_checkpoints
            self._emit(replace(event, message="its node offers it to the master") if is_elsewhere else event)


_MAX_PENDING = 2
"""Copies of a checkpoint in memory: one that is written, and one that waits."""


class CheckpointWriter:
    """Writes checkpoints in a thread, in order; a context manager, which waits at the end until all are written.

    Args:
        checkpoints: the folder to write to.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._writing: deque[Future[Event]] = deque()

    def submit(self, checkpoint: Checkpoint) -> None:
        """Write `checkpoint` soon; returns at once, unless checkpoints come faster than the disk takes them."""
        under_way = [future for future in self._writing if not future.done()]
        if len(under_way) == _MAX_PENDING:
            wait(under_way[:1])
        self._writing.append(self._thread.submit(self._write, checkpoint))

    def finished(self) -> list[Event]:
        """Return events for the checkpoints that were written, or failed, since the last call; do not wait."""
        events = []
        while self._writing and self._writing[0].done():
            events.append(self._writing.popleft().result())
        return events

    def wait(self) -> list[Event]:
        """Wait for all submitted checkpoints; return events for those that were written or failed."""
        wait(self._writing)
        return self.finished()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.wait()
        self._thread.shutdown()

    def _write(self, checkpoint: Checkpoint) -> Event:
        step = checkpoint.state.step
        try:
            return Event(step=step, kind="checkpoint", message=f"wrote {self._checkpoints.write(checkpoint)}")
        except (OSError, SafetensorError) as error:
            return Event(step=step, kind="no checkpoint", message=self._warning(step, error))

    def _warning(self, step: int, error: Exception) -> str:
        checkpoints = self._checkpoints
        last = "there is none yet" if checkpoints.is_empty else f"the last good one is {checkpoints.latest()[0]}"
        return f"cannot write the checkpoint of step {step} in {checkpoints.folder}: {first_line(error)}; {last}"
