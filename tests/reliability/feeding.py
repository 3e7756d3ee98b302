"""Mutated files fed to readers in processes of their own, and what is to be held against each answer."""

import ctypes
import gc
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from patchloom_runtime.errors import PatchloomError, ResourceError
from tests.reliability.mutations import KINDS, Mutation, obstruct
from tests.reliability.readers.reader import Reader
from tests.reliability.readers.seeds import make_outside
from tests.reliability.readers.table import READERS
from tests.reliability.readers.typed import run_command

LIMIT_S = 10.0
LIMIT_BYTES = 2 << 30
SPARE_BYTES = 6 << 30  # of address space: what asks for more is refused by the system
TYPED_EVERY = 200  # of so many cases one goes through the command line
PACKAGE = f"{os.sep}patchloom{os.sep}"
SAME, OTHERWISE, REFUSED, FAILED = "the same", "otherwise", "refused", "failed"


class Case(NamedTuple):
    """One mutation of one file, known by its number."""

    reader: str
    number: int
    seed: int = 0

    def __str__(self) -> str:
        return f"--reader {self.reader!r} --case {self.number} --seed {self.seed}"


@dataclass(frozen=True)
class Verdict:
    """What came of a case."""

    case: Case
    outcome: str
    mutation: str = ""
    failure: tuple[str, str] = ("", "")  # kind of error; innermost line of patchloom
    detail: str = ""
    seconds: float = 0.0


class Workshop:
    """The folder in which one process mutates and reads."""

    def __init__(self, root: Path, seeds: Path) -> None:
        self.root, self.seeds, self.outside = root, seeds, root / "outside"
        self._kept: dict[str, dict[str, bytes]] = {}
        self._answers: dict[str, Any] = {}
        make_outside(self.outside)
        self._beside = _state(self.outside)

    def folder(self, name: str) -> Path:
        """Of a reader; its name is short, as paths of it stand in answers."""
        return self.root / name.replace(" ", "-").replace(".", "-")

    def begin(self, name: str) -> None:
        """Fill the reader's folder and learn its answer."""
        folder, reader = self.folder(name), READERS[name]
        folder.mkdir()
        reader.make(self.seeds, folder)
        self._kept[name] = _contents(folder)
        self._answers[name] = repr(reader.read(self.seeds, folder))
        self._restore(name)
        again = repr(reader.read(self.seeds, folder))
        if again != self._answers[name]:
            raise AssertionError(f"{name} does not answer the same twice")
        self._restore(name)

    def mutate(self, case: Case) -> tuple[Mutation, Path, bool]:
        """Change a file of the reader's folder: what was done, to which, and whether checksums were made right."""
        reader, folder = READERS[case.reader], self.folder(case.reader)
        rng = random.Random(f"{case.seed} {case.reader} {case.number}")
        pattern = rng.choice(list(reader.files))
        path = rng.choice(sorted(folder.glob(pattern)))
        before = path.read_bytes()
        if rng.random() < 0.1:
            return Mutation(b"", obstruct(path, self.outside, rng)), path, False
        mutation = KINDS[reader.files[pattern]](before, rng)
        for _ in range(3):
            if mutation.data != before:
                break
            mutation = KINDS[reader.files[pattern]](before, rng)
        path.write_bytes(mutation.data)
        repaired = False
        if reader.repair and rng.random() < 0.5:
            try:
                reader.repair(folder, path)
                repaired = True
            except Exception:  # so damaged that nobody could
                repaired = False
        return mutation, path, repaired

    def judge(self, case: Case) -> Verdict:
        """Mutate, read, compare, restore."""
        if case.reader not in self._answers:
            self.begin(case.reader)
        reader, folder = READERS[case.reader], self.folder(case.reader)
        mutation, path, repaired = self.mutate(case)
        said = f"{path.relative_to(folder)}: {mutation.said}{', checksums made right' * repaired}"
        changed = _state(folder)
        typed = reader.command is not None and case.number % TYPED_EVERY == 7
        _reset_peak()
        before, started = _memory("VmRSS"), time.monotonic()
        outcome, failure, detail = self._read(case.reader, reader, folder, mutation, path, repaired, typed=typed)
        seconds, grown = time.monotonic() - started, _memory("VmHWM") - before
        if outcome != FAILED and grown > LIMIT_BYTES:
            outcome, failure, detail = FAILED, ("memory", ""), f"{grown / 2**20:,.0f} MiB"
        if outcome != FAILED and _state(self.outside) != self._beside:
            outcome, failure, detail = FAILED, ("outside touched", ""), ""
        if outcome != FAILED and not reader.writes and not typed and _state(folder) != changed:
            outcome, failure, detail = FAILED, ("written into the folder", ""), ""
        self._restore(case.reader)
        return Verdict(case, outcome, said, failure, detail, seconds)

    def _read(
        self, name: str, reader: Reader, folder: Path, mutation: Mutation, path: Path, repaired: bool, *, typed: bool
    ) -> tuple[str, tuple[str, str], str]:
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                if typed:
                    assert reader.command is not None
                    run_command(reader.command(self.seeds, folder))
                    return SAME, ("", ""), ""
                answer = repr(reader.read(self.seeds, folder))
        except PatchloomError as error:
            if not typed and ("\n" in str(error) or not str(error)):
                return FAILED, ("more than a line", _innermost(error)), str(error)[:300]
            if isinstance(error, ResourceError) and "memory" in str(error):
                return FAILED, ("appetite", _innermost(error)), str(error)[:300]
            if len(str(error)) > 3000:
                return FAILED, ("long message", _innermost(error)), f"{len(str(error))} characters: {str(error)[:200]}"
            return REFUSED, ("", ""), str(error)[:300]
        except (Exception, SystemExit) as error:
            return FAILED, (type(error).__name__, _innermost(error)), f"{type(error).__name__}: {error}"[:300]
        if warned:
            first = warned[0]
            return FAILED, ("warning", f"{_short(first.filename)}:{first.lineno}"), str(first.message)[:300]
        if answer == self._answers[name]:
            if reader.notices and not repaired and _is_changed(path, self._kept[name][str(path.relative_to(folder))]):
                return FAILED, ("not noticed", ""), ""
            return SAME, ("", ""), ""
        if (reader.ours and not repaired and not mutation.means) or mutation.shows:
            return FAILED, ("changed answer", ""), _difference(self._answers[name], answer)
        return OTHERWISE, ("", ""), ""

    def _restore(self, name: str) -> None:
        """Put back every file that is not as it was."""
        folder, kept = self.folder(name), self._kept[name]
        for place, _, files in os.walk(folder, topdown=False):
            for file in files:
                path = Path(place, file)
                if str(path.relative_to(folder)) not in kept:
                    path.unlink()
            if place != str(folder) and not os.listdir(place):
                os.rmdir(place)
        for relative, data in kept.items():
            path = folder / relative
            if path.is_symlink() or not path.is_file() or path.stat().st_size != len(data) or path.read_bytes() != data:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif os.path.lexists(path):
                    path.unlink()
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _state(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Kind, size and time of everything in a folder."""
    found = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            state = os.lstat(os.path.join(place, name))
            # A folder's time changes with what is in it, which is seen by itself.
            found[os.path.join(place, name)] = (
                state.st_mode,
                state.st_size,
                0 if name in folders else state.st_mtime_ns,
            )
    return found


def _is_changed(path: Path, before: bytes) -> bool:
    """Whether a file no longer says what it said: fields may stand in any order, and so may the header of tensors."""
    try:
        data = path.read_bytes()
        if path.suffix == ".safetensors" and not path.is_symlink():
            return _tensors(data) != _tensors(before)
        if path.suffix in (".json", ".jsonl") and not path.is_symlink():
            return [json.loads(line) for line in _values(path, data)] != [
                json.loads(line) for line in _values(path, before)
            ]
        return path.is_symlink() or data != before
    except (OSError, ValueError):
        return True


def _values(path: Path, data: bytes) -> list[bytes]:
    return data.splitlines() if path.suffix == ".jsonl" else [data]


def _tensors(data: bytes) -> tuple[object, bytes]:
    """Names, places and bytes in a safetensors file, without the notes on them, which nobody reads."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return {name: value for name, value in header.items() if name != "__metadata__"}, data[8 + length :]


def _difference(before: str, after: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    return f"…{before[max(0, at - 20) : at + 60]}… became …{after[max(0, at - 20) : at + 60]}…"


def _innermost(error: BaseException) -> str:
    """The last line of patchloom that an error came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if PACKAGE in frame.filename]
    return f"{_short(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def _short(file: str) -> str:
    return file[file.rfind(PACKAGE) + 1 :] if PACKAGE in file else os.path.basename(file)


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _memory(name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at its peak, VmSize of addresses."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{name}:")) * 1024


# Processes ----------------------------------------------------------------------------------------------------------


class Feeder:
    """A process that judges case after case; another takes its place when it hangs or dies."""

    def __init__(self, scratch: Path, seeds: Path) -> None:
        self._scratch, self._seeds, self._started = scratch, seeds, 0
        self._child: Any = None

    def verdicts(self, cases: Sequence[Case]) -> Iterator[Verdict]:
        """Of each case, in order."""
        try:
            for case in cases:
                yield self.verdict(case)
        finally:
            self.close()

    def verdict(self, case: Case) -> Verdict:
        """Of one case."""
        if self._child is None:
            self._start()
        self._begun(case)
        self._pipe.send(case)
        if not self._pipe.poll(LIMIT_S):
            self.close()
            return Verdict(
                case, FAILED, self._told(case), ("hang", self._where()), f"more than {LIMIT_S:.0f} s", LIMIT_S
            )
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._child.join()
            code = self._child.exitcode
            self.close()
            return Verdict(case, FAILED, self._told(case), ("died", ""), f"exit code {code}")
        if isinstance(answer, str):
            self.close()
            raise AssertionError(f"{case}: {answer}")
        return answer  # type: ignore[no-any-return]

    def _begun(self, case: Case) -> None:
        """The reader's own answer is not within the limit of a case."""
        self._pipe.send(case.reader)
        if not self._pipe.poll(120):
            self.close()
            raise AssertionError(f"{case.reader} does not answer")
        answer = self._pipe.recv()
        if answer:
            raise AssertionError(f"{case.reader}: {answer}")

    def _start(self) -> None:
        self._started += 1
        self._root = self._scratch / f"p{os.getpid()}-{self._started}"
        self._root.mkdir()
        self._pipe, theirs = multiprocessing.Pipe()
        self._child = multiprocessing.get_context("fork").Process(
            target=_work, args=(theirs, self._pipe, self._root, self._seeds)
        )
        self._child.start()
        theirs.close()

    def _where(self) -> str:
        """Where a process hung, which it wrote when it was told to end."""
        path = self._root / "hung"
        return path.read_text() if path.is_file() else ""

    def _told(self, case: Case) -> str:
        """What the mutation was: made once more, in this process."""
        root = self._scratch / f"told{self._started}"
        root.mkdir()
        shop = Workshop(root, self._seeds)
        folder = shop.folder(case.reader)
        folder.mkdir()
        READERS[case.reader].make(self._seeds, folder)
        mutation, path, repaired = shop.mutate(case)
        return f"{path.relative_to(folder)}: {mutation.said}{', checksums made right' * repaired}"

    def close(self) -> None:
        """End the process."""
        if self._child is None:
            return
        if self._child.is_alive():
            os.kill(self._child.pid, signal.SIGTERM)
            self._child.join(2)
        if self._child.is_alive():
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.join()
        self._pipe.close()
        self._child = None


def _work(pipe: Connection, others: Connection, root: Path, seeds: Path) -> None:
    """Judge what the pipe says, until it is closed."""
    others.close()  # or the end of the process that asks would not be noticed
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a reader that hangs ends with the process that asks
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is freed of the process this one is a copy of would hide what a reader takes
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + SPARE_BYTES,) * 2)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.environ["XDG_CACHE_HOME"] = str(root / "seen")

    def say_where(number: int, frame: Any) -> None:
        """Which line of patchloom hangs, for whoever looks for it; Python must get to run for it."""
        frames = [one for one in traceback.extract_stack(frame) if PACKAGE in one.filename]
        (root / "hung").write_text(f"{_short(frames[-1].filename)}:{frames[-1].lineno}" if frames else "")
        os._exit(1)

    signal.signal(signal.SIGTERM, say_where)
    shop = Workshop(root, seeds)
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            if isinstance(asked, str):
                if asked not in shop._answers:
                    shop.begin(asked)
                pipe.send("")
            else:
                pipe.send(shop.judge(asked))
                if asked.number % 50 == 0:
                    gc.collect()
        except BaseException:
            pipe.send(traceback.format_exc())


# Choosing and telling -----------------------------------------------------------------------------------------------


def cases_of(count: int, *, seed: int = 0, only: Sequence[str] = (), without: Sequence[str] = ()) -> list[Case]:
    """`count` cases over the readers, by their shares."""
    names = [name for name in only or READERS if name not in without]
    whole = sum(READERS[name].share for name in names)
    return [Case(name, n, seed) for name in names for n in range(max(1, round(count * READERS[name].share / whole)))]


def digest_of(verdicts: Sequence[Verdict]) -> str:
    """Equal for equal outcomes."""
    return hashlib.sha256("".join(f"{one.case} {one.outcome}\n" for one in verdicts).encode()).hexdigest()


Told = Callable[[str], None]


def tell(verdicts: Sequence[Verdict], say: Told) -> int:
    """A table of readers and outcomes, then each kind of failure with its shortest case; how many failed."""
    outcomes = (SAME, OTHERWISE, REFUSED, FAILED)
    say(f"{'reader':<18}" + "".join(f"{name:>11}" for name in (*outcomes, "cases/s")))
    for reader in dict.fromkeys(one.case.reader for one in verdicts):
        mine = [one for one in verdicts if one.case.reader == reader]
        seconds = sum(one.seconds for one in mine)
        counts = "".join(f"{sum(one.outcome == name for one in mine):>11,}" for name in outcomes)
        say(f"{reader:<18}{counts}{len(mine) / max(seconds, 1e-9):>11,.0f}")
    groups: dict[tuple[str, ...], list[Verdict]] = {}
    for one in verdicts:
        if one.outcome == FAILED:
            groups.setdefault((one.case.reader, *one.failure), []).append(one)
    for (reader, kind, where), members in sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1]))):
        shortest = min(members, key=lambda one: len(one.mutation))
        say(f"\n{reader}: {kind} at {where or '?'}, {len(members)} of the cases")
        say(f"  {shortest.mutation}\n  {shortest.detail}\n  {shortest.case}")
    return sum(one.outcome == FAILED for one in verdicts)
