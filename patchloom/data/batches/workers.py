"""The processes behind a torch `DataLoader`: how they start, which signals they mind, how their end is told.

A signal for a run often reaches its workers as well: Ctrl-C and a closed terminal go to the whole process group, a
batch system's SIGTERM to every process. The run wants to finish its step, and for that it needs them.
"""

import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from time import monotonic
from types import FrameType
from typing import Any

TOLD_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# How often a wait for a worker looks whether all live.
LOOKED_EVERY_S = 1.0


@contextmanager
def no_word_about_cores() -> Iterator[None]:
    """Without torch's warning about more workers than cores: `decoded_set.make_loader` has its own words for it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


@contextmanager
def workers_started() -> Iterator[None]:
    """Workers are forked inside: no signal reaches them before `keep_working`, and torch's SIGCHLD handler is not kept.

    That handler raises wherever the main thread is when a worker dies, even half through an update of the weights.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # where torch sets no handler
        return
    handler = signal.getsignal(signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, TOLD_TO_STOP)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def keep_working() -> None:
    """Called by a worker: it goes on when the whole group is told to stop, and ends with the process that started it.

    Only its first SIGTERM is ignored, since multiprocessing ends workers that are left over with a second.
    """

    def first(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, first)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TOLD_TO_STOP)


class Workers:
    """The worker processes of a `DataLoader`'s iterator; there are none where it has none."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._processes = getattr(iterator, "_workers", [])

    def end(self) -> None:
        """Ask them to end, and wait for it."""
        shutdown = getattr(self._iterator, "_shutdown_workers", None)
        if shutdown:
            shutdown()

    def kill(self) -> None:
        """End them whatever they do: one that is stopped or stuck would be waited for at exit, without end."""
        for process in self._processes:
            process.kill()

    def what_happened(self, timeout_s: float) -> str:
        """Which worker is dead, and of what; else which one the main process waited for in vain."""
        for process in self._processes:
            if not process.is_alive():
                return _in_words(process.pid, process.exitcode)
        if stopped := [process.pid for process in self._processes if is_stopped(process.pid)]:
            who, why = f"Worker {stopped[0]}", "It is stopped, as by SIGSTOP"
        elif task := self._iterator._task_info.get(self._iterator._rcvd_idx):
            who, why = f"Worker {self._processes[task[0]].pid}", "A disk that does not answer may be why"
        else:  # between two epochs, when each answers once
            pids = ", ".join(str(process.pid) for process in self._processes)
            who, why = f"One of the workers {pids}", "A disk that does not answer may be why"
        return (
            f"{who}, which prepares pictures, gave nothing for {timeout_s:g} s. {why}; --worker-timeout sets the time."
        )


class _WatchedQueue:
    """What workers give back. torch looks whether they live only when its whole time is over; here, every second."""

    def __init__(self, queue: Any, processes: Sequence[Any]) -> None:
        self._queue, self._processes = queue, processes

    def get(self, timeout: float) -> Any:
        waited = 0.0
        while True:
            before = monotonic()
            try:
                return self._queue.get(timeout=max(0.0, min(LOOKED_EVERY_S, timeout - waited)))
            except Empty:
                # A wait much longer than asked for: this process itself was stopped, and its workers with it.
                waited += min(monotonic() - before, 2 * LOOKED_EVERY_S)
                if waited >= timeout or not all(process.is_alive() for process in self._processes):
                    raise


def watched(iterator: Any) -> Any:
    """A `DataLoader`'s iterator, in which a wait ends soon after a worker's death."""
    queue = getattr(iterator, "_data_queue", None)
    if queue is not None and not isinstance(queue, _WatchedQueue):
        iterator._data_queue = _WatchedQueue(queue, iterator._workers)
    return iterator


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP; False where that cannot be told."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # not Linux
        return False


def _in_words(pid: int, code: int) -> str:
    if code >= 0:
        how, advice = f"ended with exit code {code}", "See what it printed above."
    elif -code == signal.SIGBUS:
        how = "was killed by SIGBUS"
        advice = "Shared memory ran out: use fewer workers or a smaller batch, or give the container more of it."
    else:
        how = f"was killed by {signal.Signals(-code).name}"
        advice = "If nobody did that, memory ran out: use fewer workers or a smaller batch."
    return f"Worker {pid}, which prepares pictures, {how}. {advice}"
