"""Metrics output during training: always to metrics.jsonl, optionally to `trackers`, and to the user's screen.

A record is {"step", "epoch", "kind": "train" or "evaluation", "weights": "model", "ema" or "average",
"values": {name: number}, "time": {…}}. Everything that depends on the clock is under "time", so two equal runs write
equal records except for that key.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from patchloom.engine.display import Display, Status
from patchloom.engine.trackers import Record, Tracker
from patchloom_runtime.errors import first_line

ENDED = "ended"  # the activity of a run that has closed its records: it has finished, or saved and stopped


class Sink(Protocol):
    """A destination for records."""

    def begin(self, count: int) -> int:
        """Start, or continue after the first `count` records. Return how many of them exist."""

    def write(self, record: Record) -> None:
        """Append a record."""

    def sync(self) -> None:
        """Flush to disk. A checkpoint that relies on it follows."""

    def close(self) -> None:
        """Flush and close."""


class StatusSink(Protocol):
    """A place where others can read what the run is doing."""

    def write(self, activity: str, status: Status | None = None) -> None:
        """Store the activity, and the newest status if there is one."""


class Records:
    """All sinks, trackers and the display as one. A tracker that fails is dropped with a warning."""

    def __init__(
        self,
        sinks: Sequence[Sink] = (),
        display: Display | None = None,
        restore: Callable[[], str] | None = None,
        trackers: Mapping[str, Tracker] | None = None,
        status: StatusSink | None = None,
    ) -> None:
        self._sinks, self._display, self._restore = sinks, display, restore
        self._trackers, self._status = dict(trackers or {}), status
        self.wants_save = False  # the folder was recreated and has no checkpoint yet

    @property
    def has_display(self) -> bool:
        """Return whether `tick` is displayed, here or by `patchloom watch`."""
        return self._display is not None or self._status is not None

    def doing(self, activity: str) -> None:
        """Store what the run does next, for `patchloom watch`."""
        if self._status:
            self._status.write(activity)

    def begin(self, count: int, notes: Sequence[str] = ()) -> int:
        """Start, or continue after the first `count` records. Return how many of them every sink still has."""
        self.doing("starting")
        left = min([count, *(sink.begin(count) for sink in self._sinks)])
        self._show(lambda display: display.begin())
        self._track(lambda tracker: tracker.begin(resumed=count > 0))
        for text in notes:
            self.note(text)
        if left < count:
            self.note(f"metrics.jsonl has lost {count - left} of its {count} lines; the run continues without them")
        return left

    def write(self, record: Record) -> None:
        """Write a record to every sink. Recreate the run folder first if it was removed."""
        if self._restore and (message := self._restore()):
            self.note(message)
            self.wants_save = True
        for sink in self._sinks:
            sink.write(record)
        self._track(lambda tracker: tracker.write(record))
        if record["kind"] == "evaluation":
            self._show(lambda display: display.show_values(record))

    def sync(self) -> None:
        """Flush every sink to disk."""
        for sink in self._sinks:
            sink.sync()

    def tick(self, status: Status) -> None:
        self._show(lambda display: display.tick(status))
        if self._status:
            self._status.write("training", status)

    def note(self, text: str) -> None:
        """Show a line of text."""
        self._show(lambda display: display.note(text))

    def close(self) -> None:
        """Close every sink, every tracker and the display."""
        for sink in self._sinks:
            sink.close()
        self._track(lambda tracker: tracker.close())
        self.doing(ENDED)
        self._show(lambda display: display.close())

    def _track(self, what: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                what(tracker)
            except Exception as error:  # any error of a third-party package; the run matters more
                del self._trackers[name]
                self.note(f"warning: {name} failed ({first_line(error)}); the run continues without it")

    def _show(self, what: Callable[[Display], None]) -> None:
        if not self._display:
            return
        try:
            what(self._display)
        except OSError:
            # The terminal was closed or the pipe has no reader: the run continues without display.
            self._display = None
