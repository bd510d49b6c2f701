"""The trainer of a task of Ultralytics, whose every batch is that of all ranks.

Every rank runs a whole training of its own, in a folder of its own, as if it were one process: the loop, warm-up,
accumulation, clipping, averages, early stop, recovery and checkpoints are Ultralytics' own. Only four things are those
of all ranks together, so that all ranks have the same weights and come to the same decisions:

    a batch          every rank loads its part (`sharded_loader`)
    its loss         by the counts of all (`criteria`), with the statistics of all in BatchNorm (`DistributedModel`)
    its gradient     summed over the ranks before the optimiser's step (`step_gradients`)
    a validation     each rank evaluates a part; all ranks take the leader's metrics (`validation`)

When a rank is lost, the others repeat what they were doing (`generations`).
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler, SequentialSampler
from ultralytics.engine.trainer import BaseTrainer
from ultralytics.utils.torch_utils import unwrap_model

from evener.comm.group import Group
from evener.data.loader import seed_all
from evener.data.sampler import OrderedSampler
from evener.frontends.yolo.callbacks import OPENING, LeaderCallbacks, has_user_callbacks, open_trackers, unchanged
from evener.frontends.yolo.criteria import RankImages, require_known_loss, share_criterion
from evener.frontends.yolo.generations import Generations
from evener.frontends.yolo.run_folder import share_best, take_folder
from evener.frontends.yolo.settings import in_a_sentence
from evener.frontends.yolo.sharded_loader import ShardedLoader, keep_images
from evener.frontends.yolo.step_gradients import StepGradients
from evener.frontends.yolo.trainer_rank import TrainerRank
from evener.frontends.yolo.validation import distributed_validator
from evener.parallel.shared_statistics import SharedStatistics
from evener.records.errors import Interrupted, InvalidInput, NodeLost
from evener.training.step import StepResult

_LONE_IMAGE = "BatchNorm a single value per channel"
"""In the message of Ultralytics for a last batch of one image that is too small; it says what to change."""
_NO_RETRY = 3
"""Batches that were halved for want of memory, as many as Ultralytics allows: a batch of all ranks is not halved."""


def distributed_trainer(base: type, trainer_rank: TrainerRank) -> type:
    """The trainer class `base` of a task, for the rank at `trainer_rank`."""
    return type(f"Distributed{base.__name__}", (DistributedTrainer, base), {"trainer_rank": trainer_rank})


class DistributedTrainer(BaseTrainer):
    """Mixed into the trainer of a task by `distributed_trainer`; all ranks have one.

    Attributes:
        trainer_rank: this rank's place in the run.
        has_user_callbacks: whether the user has added callbacks, on any rank.
    """

    trainer_rank: TrainerRank
    callbacks: Any
    model: Any
    amp: Any
    best_fitness: Any

    def __init__(self, *arguments: Any, **named: Any) -> None:
        threads = torch.get_num_threads()
        self.has_user_callbacks = self._asks_to_stop = False
        self._has_trackers, self._passed, self._is_evaluating = self.trainer_rank.leads, list[str](), False
        super().__init__(*arguments, **named)
        if self.trainer_rank.env.node.threads is not None:
            torch.set_num_threads(threads)  # Ultralytics takes those of the whole machine
        self.callbacks = LeaderCallbacks(self.callbacks, lambda: self.trainer_rank.leads)

    def run_callbacks(self, event: str) -> None:
        """Handle an event: callbacks on the leader alone, and the work of ranks on every rank."""
        if event == OPENING[0]:
            self.args.name = self.trainer_rank.run_name or self.args.name  # by which trackers name the run
        if self.trainer_rank.leads:
            self._run_on_leader(event)
        if event == OPENING[0]:
            self.trainer_rank.share_random_state()
        if event in OPENING or event == "on_train_epoch_start":
            self._passed = [one for one in self._passed if one != event] + [event]
        elif event == "on_fit_epoch_end":
            self._passed = [one for one in self._passed if one in OPENING]
        if event == "on_train_epoch_start":
            if self.trainer_rank.trial is not None:
                self.start_epoch = 0  # of the trial: from its second epoch on, a loss that is no number is mended
            self.trainer_rank.begin_epoch()
        elif event == "on_train_batch_start":
            self._oom_retries = _NO_RETRY
            self.trainer_rank.begin_batch(self.train_loader.part.step)
        elif event == "on_train_batch_end":
            self._end_batch()
        elif event == "on_train_epoch_end":
            self.trainer_rank.end_epoch()
        elif event == "on_fit_epoch_end" and not self._is_evaluating:
            self._end_epoch()

    def _run_on_leader(self, event: str) -> None:
        """Run the callbacks of an event. Raises InvalidInput: they change what all ranks have alike, here alone."""
        if self.trainer_rank.group.is_alone or not has_user_callbacks({event: self.callbacks.get(event, [])}):
            super().run_callbacks(event)
            return
        stop = getattr(self, "stop", False)
        with unchanged(self, event):
            super().run_callbacks(event)
        if getattr(self, "stop", False) != stop:  # all stop together, at the end of the epoch
            self._asks_to_stop, self.stop = True, stop

    def _end_epoch(self) -> None:
        """End an epoch, after its validation; all ranks call this. Raises Interrupted: a search ends the trial."""
        if self.has_user_callbacks:
            self._stop_where_asked()
        if self.trainer_rank.trial is not None:
            self.trainer_rank.trial.end_epoch(self)

    def _stop_where_asked(self) -> None:
        """Stop after this epoch if a callback of the leader asks for it; all ranks call this."""
        if not self.trainer_rank.group.is_alone:
            asks = bool(self.trainer_rank.together(lambda: self.trainer_rank.of_leader(self._asks_to_stop)))
            self.stop = bool(self.stop) or asks

    def get_dataset(self) -> Any:
        """The description of the data; one rank of a machine reads it first, and downloads it if it has to."""
        with self.trainer_rank.in_turn(), in_a_sentence():
            return super().get_dataset()

    def build_dataset(self, *arguments: Any, **named: Any) -> Any:
        """A data set; one rank of a machine reads its labels first, and keeps them for the others."""
        with self.trainer_rank.in_turn(), in_a_sentence():
            dataset = super().build_dataset(*arguments, **named)
        keep_images(dataset, self.trainer_rank.spare_bytes(self.args.workers))
        return dataset

    def get_dataloader(self, dataset_path: Any, batch_size: int = 16, rank: int = -1, mode: str = "train") -> Any:
        """This rank's part of the batches."""
        plain = super().get_dataloader(dataset_path, batch_size, rank, mode)
        if mode == "train" and not isinstance(plain.sampler, RandomSampler | SequentialSampler):
            sampler = type(plain.sampler).__name__
            raise InvalidInput(
                f"the sampler {sampler} of your trainer's loader would be left out: nodes draw images alike"
            )
        group, seed = self.trainer_rank.group, self.args.seed
        count, size = len(plain.dataset), plain.batch_size
        if mode != "train":
            sizes = self.trainer_rank.sizes_now
            return ShardedLoader(
                plain,
                lambda: OrderedSampler(count=count, batch_size=size, rank=group.rank, sizes=sizes),
                seed=seed,
            )
        return ShardedLoader(
            plain,
            lambda: self.trainer_rank.work.train_sampler(plain.dataset, size, seed),
            seed=seed,
            epoch=lambda: self.epoch,
            timer=group.timer,
            draws_from_all=not self.trainer_rank.is_stationary,
            done=self._done,
        )

    def auto_batch(self, *arguments: Any, **named: Any) -> int:
        """Images of a batch that the memory of all accelerators holds together; on CPUs what Ultralytics takes there.

        Ultralytics measures how many each of them holds. Shares follow speeds and, again measured, memory.
        """
        own = int(super().auto_batch(*arguments, **named))
        return self.trainer_rank.batch_of_all(own)

    def get_validator(self) -> Any:
        """That of all ranks."""
        return distributed_validator(super().get_validator(), self.trainer_rank.group)

    def _setup_train(self) -> None:
        self.args.amp = self.trainer_rank.common_precision(self.args.amp)
        try:
            super()._setup_train()
        except ValueError as error:
            if _LONE_IMAGE in str(error):
                raise InvalidInput(str(error)) from error
            raise
        self._agree_on_precision()
        self.has_user_callbacks = not self.trainer_rank.all_say(not has_user_callbacks(self.callbacks))
        model = unwrap_model(self.model)
        self.trainer_rank.begin(self, model)
        if self.trainer_rank.may_have_others:
            require_known_loss(model)
            if getattr(model, "criterion", None) is None:
                model.criterion = model.init_criterion()
            model.criterion = share_criterion(model.criterion, lambda: self._images(self.train_loader))
        self.model = DistributedModel(model, self.trainer_rank.group, self, self.trainer_rank.generations)
        self.trainer_rank.take_part(self)

    def resume_training(self, ckpt: Any) -> None:
        """Take over what a checkpoint holds."""
        with in_a_sentence():
            super().resume_training(ckpt)

    def _agree_on_precision(self) -> None:
        """Half precision on all ranks, or on none: each has tried it for itself."""
        if self.amp and not self.trainer_rank.all_say(self.amp):
            self.amp = False
            self.scaler = torch.amp.GradScaler(self.device.type, enabled=False)

    def _images(self, loader: ShardedLoader) -> RankImages:
        assert loader.part is not None
        return RankImages(self.trainer_rank.group, len(loader.part.indices))

    def preprocess_batch(self, batch: Any) -> Any:
        """The batch on the device; a size that is drawn for its images is the same on all ranks."""
        part = self.train_loader.part
        seed_all(self.args.seed, 0 if part is None else part.step)
        return super().preprocess_batch(batch)

    def optimizer_step(self) -> None:
        """Clip the gradients of all ranks, make the step and move the averages as one process."""
        timer = self.trainer_rank.group.timer
        timer.pause()
        self.trainer_rank.fence()
        timer.resume("wu")
        super().optimizer_step()
        timer.pause()

    def _end_batch(self) -> None:
        """Report the batch to the others, and hear how it went there."""
        part = self.train_loader.part
        loss = sum(self.loss_items.values()) / self.trainer_rank.group.size
        result = StepResult(epoch=part.epoch, samples=len(part.indices), total=part.total, loss=loss)
        trial = self.trainer_rank.trial
        if self.trainer_rank.end_batch(part.step, result) and (trial is None or trial.stop(self, part.step)):
            advice = self.trainer_rank.leave(self) if trial is None else ""
            raise Interrupted(f"stopped in epoch {self.epoch + 1} as asked{advice}")

    def _done(self) -> int:
        """The last batch of the training, from 1, that is computed."""
        return self.model.done if isinstance(self.model, DistributedModel) else 0

    def _handle_nan_recovery(self, epoch: int) -> bool:
        """Whether the loss is no number, so that the epoch is done again: by all, for all know the loss of all."""
        is_again = bool(super()._handle_nan_recovery(epoch))
        if is_again:
            done = epoch * len(self.train_loader)
            self.model.restart(done)
            self.trainer_rank.restart_epoch(done)
        return is_again

    def validate(self) -> Any:
        """(metrics, fitness) of the averaged weights: the leader's, on every rank."""
        begin = time.perf_counter()
        metrics, fitness, self.best_fitness = self.trainer_rank.together(self._validated)
        self.trainer_rank.end_validation(begin, self.train_loader.part, metrics)
        return metrics, fitness

    def _validated(self) -> Any:
        """(metrics, fitness, best fitness), the leader's; plain values."""
        averaged = self.ema.ema
        if not self.trainer_rank.group.is_alone:
            averaged.criterion = share_criterion(averaged.init_criterion(), lambda: self._images(self.test_loader))
        results = *super().validate(), self.best_fitness
        averaged.criterion = None
        return self.trainer_rank.of_leader(results)

    def save_model(self) -> Any:
        """Write the checkpoints of an epoch atomically, so that a killed rank leaves whole files to resume from."""
        self.trainer_rank.fence()
        whole = {name: getattr(self, name) for name in ("last", "best")}
        for name, path in whole.items():
            setattr(self, name, path.with_name(f".{path.name}"))
            getattr(self, name).unlink(missing_ok=True)
        was_saved = super().save_model()
        for name, path in whole.items():
            if getattr(self, name).exists():
                getattr(self, name).replace(path)
            setattr(self, name, path)
        return was_saved

    def save_metrics(self, metrics: Any) -> None:
        """Write the line of an epoch; each rank does, into its own folder."""
        self.trainer_rank.fence()
        super().save_metrics(metrics)

    def plot_training_samples(self, batch: Any, ni: int) -> None:
        """Draw the leader's part of a batch."""
        if self.trainer_rank.group.is_leader:
            super().plot_training_samples(batch, ni)

    def plot_training_labels(self) -> None:
        """Draw what is in the data; the leader does."""
        if self.trainer_rank.group.is_leader:
            super().plot_training_labels()

    def plot_metrics(self) -> None:
        """Draw the course of the training; the leader does."""
        if self.trainer_rank.group.is_leader:
            super().plot_metrics()

    def final_eval(self) -> None:
        """Validate the best weights, which every rank has in its own folder."""
        threads = torch.get_num_threads()
        self._is_evaluating = True
        self.trainer_rank.end_training()
        self.trainer_rank.together(self._evaluated)
        torch.set_num_threads(threads)

    def _evaluated(self) -> None:
        self.trainer_rank.fence()
        share_best(self)
        super().final_eval()

    def speak_for_all(self) -> None:
        """This rank is the leader: if it was not, it writes into the folder of the run from now on."""
        if self.trainer_rank.folder not in (None, self.save_dir):
            logging.getLogger("ultralytics").setLevel(logging.INFO)
            take_folder(self, self.trainer_rank.folder)
        if not self._has_trackers:
            self._has_trackers = True
            open_trackers(self, self._passed)


_NEVER = 1 << 40
"""Batches of a step that keep the loop from making one now."""


class DistributedModel(nn.Module):
    """A model whose ranks each compute a part of a batch; its BatchNorms have the statistics of the whole batch.

    A batch is computed here to its end: forward, backward, and the sums of gradients if a step follows, so Ultralytics'
    loop has nothing left to do for its own backward pass. All communication happens here, and the remaining ranks
    repeat it here when one is lost. The trainer finds the model itself in `module`, as with DistributedDataParallel.

    Args:
        module: the model.
        group: the ranks.
        trainer: of Ultralytics, set up; its loader gives the batches that the model is called with.
        generations: of a run that goes on without some ranks; None: it does not.

    Attributes:
        gradients: of all ranks; None of a rank that is alone, whose state nothing needs.
        done: the last batch of the training, from 1, that was computed, before this run began or in it.
        told: the loss of a batch and its parts, as returned to the loop.
    """

    def __init__(self, module: nn.Module, group: Group, trainer: Any, generations: Generations | None) -> None:
        super().__init__()
        self.module = module
        self.gradients: StepGradients | None
        self.gradients = None
        if trainer.trainer_rank.may_have_others:
            keeps_state = trainer.trainer_rank.trial is not None
            self.gradients = StepGradients(module, group, trainer, keeps_state=keeps_state)
        self.done = trainer.start_epoch * len(trainer.train_loader)
        self.told: tuple[Tensor, dict[str, Tensor]] = torch.zeros(1), {}
        self._group, self._trainer, self._generations = group, trainer, generations
        self._shared = SharedStatistics(lambda _: group)
        self._before = [buffer.clone() for buffer in module.buffers()] if generations is not None else []
        self._kept_after = -1

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and its parts; gradients are those of all ranks if a step follows."""
        number = self._trainer.train_loader.part.step
        if self.gradients is not None:
            self._trainer.accumulate = _NEVER
        while number > self.done:
            try:
                self._compute(number, batch)
            except (RuntimeError, NodeLost) as error:
                if self._generations is None:
                    raise
                self._generations.go_on(error)
                batch = None
        loss, parts = self.told
        return loss.detach().requires_grad_(), parts

    def restart(self, done: int) -> None:
        """Repeat an epoch that began after `done` batches."""
        self.done = done
        if self.gradients is not None:
            self.gradients.restart()
        self._kept_after = -1

    @torch.no_grad()
    def take_back(self, done: int) -> None:
        """Discard all batches after the first `done`, which the remaining ranks repeat after a loss."""
        assert self.gradients is not None
        self.gradients.forget()
        if self._kept_after == done:
            torch._foreach_copy_(list(self.module.buffers()), self._before)
        self.done = done

    def _compute(self, number: int, batch: Any) -> None:
        """Compute batches up to `number`, among them earlier ones whose gradients were lost with a rank."""
        for again in range(self.done + 1, number):
            self._pass(self._read(again))
            batch = None  # it was loaded ahead for the previous ranks
        self._pass(self._read(number) if batch is None else batch)

    def _read(self, number: int) -> Any:
        """Read this rank's part of a batch, with the current ranks."""
        return self._trainer.preprocess_batch(self._trainer.train_loader.read(number))

    def _pass(self, batch: Any) -> None:
        """Forward and backward, and the sums of gradients if a step follows."""
        part, timer = self._trainer.train_loader.part, self._group.timer
        if self._generations is not None and self._generations.batch == self.done:
            self._keep()
        completes = self.gradients is not None and self.gradients.begin(part.step - 1)
        seed_all(self._trainer.args.seed, part.step, stream=self._group.rank, device=self._group.device)
        loss, parts = self._outputs(batch, len(part.indices) > 0)
        with torch.autocast(self._group.device.type, enabled=False):
            self._trainer.scaler.scale(loss.sum()).backward()
        self.told = loss.detach(), parts
        if self.gradients is not None and completes:
            timer.pause(before_update=self.gradients.is_due)
            self.gradients.finish(part.step - 1)
            if self.gradients.is_due:
                self._trainer.accumulate = 1
        self.done = part.step
        if self._generations is not None and completes:
            self._generations.completed(part.step)

    def _outputs(self, batch: Any, is_counted: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the output of the module for a batch of all ranks."""
        if self._group.size == 1:
            return self.module(batch)  # type: ignore[no-any-return]
        self._shared.counting = is_counted
        with self._shared:
            return self.module(batch)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _keep(self) -> None:
        """Copy the running statistics: the forward pass changes them, and may have to be repeated."""
        torch._foreach_copy_(self._before, list(self.module.buffers()))
        self._kept_after = self.done
