"""The training loop. `train` is all of it; it depends on no method, network or file format."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.engine.agreement import RankAgreement, RankRequests, is_bad
from patchloom.engine.batches import Feed, len_of, split
from patchloom.engine.meter import Meter
from patchloom.engine.optimization import set_rates
from patchloom.engine.reporter import Reporter
from patchloom.engine.run import Run
from patchloom.engine.selection import Selection
from patchloom.engine.signals import CaughtSignal, Interrupted, Stopped, caught_signals
from patchloom.engine.state import Progress, Snapshot, capture, restore
from patchloom.models.from_config import is_sharded
from patchloom.objectives.objective import Objective
from patchloom_runtime.errors import (
    DataError,
    DeviceError,
    NumericalError,
    ResourceError,
    first_line,
    is_device_failure,
    is_out_of_memory,
)


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    ended: str  # "finished", "no better", "time limit", "stopped by a callback"
    progress: Progress
    best_reports: Sequence[Any] = field(default=(), repr=False, compare=False)  # of the best weights, if known


def train(run: Run, snapshot: Snapshot | None = None) -> TrainResult:
    """Train from the start or continue exactly from `snapshot`. A signal saves the run and raises Stopped."""
    forward = run.processes.prepare(Step(run.model, run.objective, run.processes.autocast))
    progress, notes = restore(run, snapshot) if snapshot else (Progress.of_new_run(run.steps, run.epochs), [])
    if progress.has_ended(run.epochs):
        return TrainResult(progress.ended, progress)
    progress.ended = ""
    if run.epochs > progress.planned_epochs:  # a run that was fitted to a time budget continues by epochs
        progress.total_steps = 0
    if beyond := not progress.total_steps and progress.epoch >= run.epochs:
        notes = [*notes, f"{progress.epoch} epochs are trained and {run.epochs} were requested: nothing to train"]
    progress.records = run.records.begin(progress.records, notes)
    loop = _Loop(run, forward, progress)
    with caught_signals() as caught, closing(run.records), loop.device_faults("between steps. Free some of it."):
        if beyond:
            loop.evaluate(progress.epoch, caught)
            progress.ended = "finished"
        while not progress.ended:
            loop.set_mode()
            done = progress.step - progress.epoch * run.loader.steps_per_epoch
            for batch in () if loop.is_last_step() else loop.batches(done, caught):
                requests = loop.update(batch, partial(loop.requests, caught))
                loop.advance()
                loop.reporter.after_step()
                if requests.terminate or requests.interrupt:
                    raise loop.stopped(caught.number or (signal.SIGTERM if requests.terminate else signal.SIGINT))
                if requests.time_up:
                    loop.evaluate(progress.epoch, caught)
                    loop.save()
                    return TrainResult("time limit", progress, loop.selection.best_reports)
                if requests.save:
                    loop.save()
                if loop.is_last_step() or loop.is_stopped():
                    break
            last = loop.is_last_step() or loop.is_stopped()
            whole = progress.step >= (progress.epoch + 1) * run.loader.steps_per_epoch
            epoch = progress.epoch + whole
            if last or (epoch % run.evaluate_every == 0 and loop.affords_evaluation()):
                loop.evaluate(epoch, caught)
            progress.epoch = epoch
            if whole:
                progress.samples = 0
                loop.after_epoch()
            if loop.is_last_step():
                progress.ended = "finished"
            elif loop.is_stopped():
                progress.ended = "stopped by a callback"
            elif run.patience is not None and progress.not_better >= run.patience:
                progress.ended = "no better"
        loop.save()
    return TrainResult(progress.ended, progress, loop.selection.best_reports)


class Step(nn.Module):
    """Model and objective as one module under autocast, so that DDP sees the whole forward pass."""

    def __init__(
        self, model: nn.Module, objective: Objective, autocast: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.autocast = autocast
        # Already equal on all ranks, so DDP need not broadcast them in every step.
        self._ddp_params_and_buffers_to_ignore = [f"objective.{name}" for name in objective.equal_on_all_ranks]

    def forward(self, batch: Any, epoch: int, step: int) -> dict[str, Tensor]:
        """Return the objective's scalars, those of half precision as float32."""
        with self.autocast():
            values = self.objective(self.model, batch, epoch=epoch, step=step)
        half = (torch.bfloat16, torch.float16)
        return {name: value.float() if value.dtype in half else value for name, value in values.items()}


class _Loop:
    """The state of a running training and the operations of the loop."""

    def __init__(self, run: Run, forward: nn.Module, progress: Progress) -> None:
        self.run, self.forward, self.progress = run, forward, progress
        self.feed = Feed(run.processes)
        self.meter = Meter(self.feed, run.processes.device)
        self.agreement = RankAgreement(run.processes)
        self.reporter = Reporter(run, progress, self.meter)
        self.selection = Selection(run, progress, self.reporter)
        self._saved_at, self._saved_step = perf_counter(), progress.step

    def advance(self) -> None:
        """Count an update.

        With a time budget, move through the schedule at its pace and refit the number of updates.
        """
        run, progress, budget = self.run, self.progress, self.run.time_budget
        if progress.total_steps:
            left = progress.total_steps - progress.step
            progress.position += (run.schedule.total_steps - progress.position) / left
        progress.step += 1
        if plan := run.plan:
            progress.samples = min(progress.samples + plan.batch_size, plan.views_per_epoch)
        total = self.total_steps
        if budget and budget.check_due(progress.step, total) and progress.step < total:
            steps_per_evaluation = run.loader.steps_per_epoch * run.evaluate_every
            fitted = run.processes.from_main(budget.corrected(progress.step, total, steps_per_evaluation))
            if fitted != total:
                if not progress.total_steps:
                    progress.position, progress.planned_epochs = float(progress.step), run.epochs
                progress.total_steps = fitted

    @property
    def total_steps(self) -> int:
        """Return the number of updates of the whole run, planned or fitted to its time budget."""
        return self.progress.total_steps or self.run.schedule.total_steps

    def is_last_step(self) -> bool:
        """Return whether the latest update was the last one."""
        return self.progress.step >= self.total_steps

    def is_stopped(self) -> bool:
        """Return whether a callback ended the run. All ranks must call this together."""
        callbacks = self.run.callbacks
        return bool(callbacks) and self.run.processes.from_main(callbacks.stops)

    def affords_evaluation(self) -> bool:
        """Return whether there is time for an evaluation before the last. All ranks must call this together."""
        budget = self.run.time_budget
        return budget is None or self.run.processes.from_main(budget.affords_evaluation())

    def set_mode(self) -> None:
        """Return to training mode after an evaluation."""
        self.run.records.doing("training")
        self.forward.train()
        if self.run.eval_mode:
            self.run.model.eval()

    def batches(self, done: int, caught: CaughtSignal) -> Iterator[Any]:
        """Yield the rest of this epoch. If the data fail, save the run before raising."""
        progress, plan = self.progress, self.run.plan
        moved = [plan.offset_at(progress.samples)] if plan else []
        try:
            with self.device_faults(f"for a batch. {self._smaller_parts()}"):
                yield from self.feed(self.run.loader.epoch(progress.epoch, done, *moved))
        except DeviceError:
            raise
        except (DataError, ResourceError):
            # Ranks save together or not at all, and the others do not know of this failure.
            if self.run.processes.world > 1:
                raise
            if caught.number:
                # The sender may have signaled the loader's workers too.
                raise self.stopped(caught.number) from None
            self.save()
            raise

    def evaluate(self, epoch: int, caught: CaughtSignal) -> None:
        """Evaluate after `epoch`. If that fails or is interrupted, save the run as it was before the evaluation."""
        alone, before = self.run.processes.world == 1, self.progress.epoch
        self.run.records.doing("evaluating")
        try:
            self.progress.epoch = epoch
            # With several ranks, all would have to abort together.
            interruptible = caught.interruptible() if alone else nullcontext()
            timed = self.run.time_budget.evaluating() if self.run.time_budget else nullcontext()
            for module in (self.run.model, self.run.averaged):
                if module is not None:  # DDP does this too: batch statistics are those of rank 0
                    self.run.processes.same_on_all_(module, buffers_only=True)
            with self.device_faults("in an evaluation. Free some of it."), interruptible, timed:
                self.selection.evaluate()
        except DeviceError:
            raise
        except (DataError, ResourceError, Interrupted):
            self.progress.epoch = before
            if not alone:
                raise
            if caught.number:
                raise self.stopped(caught.number) from None
            self.save()
            raise

    @contextmanager
    def device_faults(self, advice: str) -> Iterator[None]:
        """Convert out-of-memory errors (with `advice`) and device failures (with the step to resume from)."""
        device = self.run.processes.device
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                clear_frames(error.__traceback__)  # frames keep tensors on the device alive
                raise ResourceError(f"Memory of {device} ran out {advice} The same command resumes the run.") from error
            if is_device_failure(error):
                saved = f"resumes from step {self._saved_step}, which is saved" if self._saved_step else "starts again"
                raise DeviceError(
                    f"{device} failed after step {self.progress.step}: {first_line(error)}. Nothing can be read from "
                    f"it; the same command {saved}."
                ) from error
            raise

    def stopped(self, number: int) -> Stopped:
        """Save the run and return the error for signal `number`."""
        return Stopped(number, self.progress.step, self.total_steps, saved=self.save())

    def requests(self, caught: CaughtSignal) -> RankRequests:
        run = self.run
        return RankRequests(
            terminate=caught.number not in (0, signal.SIGINT),
            interrupt=caught.number == signal.SIGINT,
            time_up=run.time_limit_s is not None and self.meter.elapsed_s >= run.time_limit_s,
            save=run.saver is not None
            and (run.records.wants_save or perf_counter() - self._saved_at >= run.save_every_s),
        )

    def update(self, batch: Any, requests: Callable[[], RankRequests]) -> RankRequests:
        """Update the weights once and return the requests of all ranks."""
        run, step = self.run, self.progress.step
        position = self.progress.position if self.progress.total_steps else step
        self.reporter.lr = run.schedule.lr(position)
        set_rates(run.optimizer, self.reporter.lr, run.schedule.weight_decay(position))
        before = run.processes.rng_states(), dict(run.averages.sums), run.averages.count
        advice = f"with {len_of(batch)} examples in {run.accumulate} micro-batch(es). {self._smaller_parts()}"
        try:
            with self.device_faults(advice), run.rounded.during(step) if run.rounded else nullcontext():
                self._add_gradients(batch, requests)
                loss, all_requests = self.agreement.receive(requests)
        except DeviceError:
            raise
        except ResourceError:
            self._save_before_step(*before)
            raise
        if is_bad(loss):
            raise _bad_loss(loss, step, self.progress.epoch, batch)
        with self.device_faults(advice):
            run.objective.before_update(run.model, int(position))
            for parameter in run.frozen if self.progress.epoch < run.frozen_epochs else ():
                parameter.grad = None  # optimizers skip it
            run.processes.update(run.optimizer, run.clip_norm, run.clip_each)
        if run.average:
            run.average.update(step)
        run.objective.after_update(run.model, int(position))
        self.meter.add(len_of(batch) * run.processes.world)
        return all_requests

    def _add_gradients(self, batch: Any, requests: Callable[[], RankRequests]) -> None:
        """Accumulate the gradients of the batch's mean loss over its micro-batches."""
        run, epoch = self.run, self.progress.epoch
        step_in_epoch = self.progress.step - epoch * run.loader.steps_per_epoch
        parts, size = split(batch, run.accumulate), len_of(batch)
        total = torch.zeros((), device=run.processes.device)
        for number, part in enumerate(parts, 1):
            last = number == len(parts)
            with nullcontext() if last else run.processes.no_sync(self.forward):
                values = self.forward(part, epoch, step_in_epoch)
                share = len_of(part) / size
                run.averages.add(values, share)
                loss = values["loss"] * share
                total += loss.detach()
                if last:
                    self.agreement.send(total, requests)
                run.processes.backward(loss)

    def _smaller_parts(self) -> str:
        return f"Use --micro-batches {2 * self.run.accumulate}: each update still uses the whole batch."

    def _save_before_step(self, generators: list[Tensor], sums: dict[str, Tensor], count: float) -> None:
        """Save the run as it was before a step whose update failed, unless the forward pass changes buffers."""
        run = self.run
        buffers = self.forward.state_dict().keys() - dict(self.forward.named_parameters(remove_duplicate=False))
        if run.processes.world > 1 or self.progress.step == self._saved_step or buffers:
            return
        run.processes.set_rng_states(generators)
        run.averages.sums, run.averages.count = sums, count
        try:
            self.save()
        except RuntimeError as error:
            if not is_out_of_memory(error) and not is_device_failure(error):
                raise

    def after_epoch(self) -> None:
        """Call the run's `after_epoch`, which, like an evaluation, must not affect training."""
        run = self.run
        if run.after_epoch:
            run.records.doing("finishing the epoch")
            run.model.eval()
            with torch.no_grad(), run.processes.rng_preserved():
                run.after_epoch(run.model, self.progress.epoch)
        run.callbacks.call("on_epoch", run, self.progress)

    def save(self) -> bool:
        """Save a checkpoint; all ranks together. Return False if the run has no folder."""
        run = self.run
        if not run.processes.from_main(run.saver is not None):
            return False
        run.records.doing("saving")
        self.selection.save_weights()
        snapshot = capture(run, self.progress)
        together = any(is_sharded(tensor) for named in snapshot.tensors.values() for tensor in named.values())
        if run.saver and (run.processes.is_main or together):
            run.records.sync()  # the checkpoint counts its lines
            run.saver.save(snapshot, run.processes)
        run.processes.barrier()
        self._saved_at, run.records.wants_save = perf_counter(), False
        self._saved_step = self.progress.step
        return True


def _bad_loss(loss: float, step: int, epoch: int, batch: Any) -> NumericalError:
    error = NumericalError(
        f"The loss is {loss} at step {step} (epoch {epoch + 1}); the weights were not updated. "
        "Lower optim.lr, set optim.clip_norm, or use precision fp32."
    )
    # Indices of the images, for callers that know their files.
    index = getattr(batch, "index", None)
    error.index = index.tolist() if isinstance(index, Tensor) else []  # type: ignore[attr-defined]
    return error
