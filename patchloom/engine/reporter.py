"""Writing a running training's numbers to its records and the display."""

from patchloom.engine.display import Status
from patchloom.engine.meter import Meter
from patchloom.engine.run import Run
from patchloom.engine.state import Progress


class Reporter:
    """A record every `log_every` steps and at the end of each epoch; a displayed status once per second."""

    def __init__(self, run: Run, progress: Progress, meter: Meter) -> None:
        self._run, self._progress, self._meter = run, progress, meter
        self.lr = 0.0  # of the latest update

    def after_step(self) -> None:
        """Record, display and call back. All ranks call this after every update."""
        run, step = self._run, self._progress.step
        run.callbacks.call("on_step", run, self._progress)
        if self._meter.tick_due() or step == self._total_steps:
            self._show()
        if step % run.log_every == 0 or step % run.loader.steps_per_epoch == 0:
            values = run.running_means.read(run.processes) | {"lr": self.lr}
            run.running_means.reset()
            self.write("train", values)

    @property
    def _total_steps(self) -> int:
        return self._progress.total_steps or self._run.schedule.total_steps

    def write(self, kind: str, values: dict[str, float], weights: str = "model") -> None:
        """Write one record with the run's position and speed."""
        self._progress.records += 1
        self._run.records.write(
            {
                "step": self._progress.step,
                "epoch": self._progress.epoch,
                "kind": kind,
                "weights": weights,
                "values": values,
                "time": self._meter.speed(),
            }
        )

    def _show(self) -> None:
        run, progress = self._run, self._progress
        if not run.records.has_display:
            return
        speed = self._meter.speed()
        best = f"best {run.metric} {progress.best:.4g}" if progress.best is not None else ""
        total_steps = self._total_steps
        epochs = -(-total_steps // run.loader.steps_per_epoch)
        self._run.records.tick(
            Status(
                step=progress.step,
                total_steps=total_steps,
                epoch=min(progress.epoch + 1, epochs),
                epochs=epochs,
                lr=self.lr,
                images_per_s=speed["images_per_s"],
                data_share=speed["data_share"],
                left_s=self._meter.left_s(total_steps - progress.step),
                memory_mib=speed["memory_mib"],
                values=run.running_means.read(),
                best=best,
                unit=run.unit,
            )
        )
