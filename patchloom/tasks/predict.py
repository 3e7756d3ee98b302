"""`patchloom.predict`: predictions for image files, as a list, a table or folders by class, for all tasks."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from patchloom.disk import temporary_folder
from patchloom.runs.config import is_run
from patchloom.tasks.table import task_named, task_of_run
from patchloom_runtime.errors import DataError, UsageError, at_least, with_near_options
from patchloom_runtime.images.decode import MAX_FILE_BYTES, format_of

if TYPE_CHECKING:
    from patchloom.tasks.task import Task

STDIN = "-"
_CHUNK_BYTES = 1 << 16
_MOST_OF_LINE = 1 << 16  # bytes; the longest path of Linux has 4,096
_SIGNATURE_BYTES = 16
_TEXT_LIKE = ("BMP", "PPM")  # formats whose first bytes could also begin a list of paths

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@dataclass
class PredictionCounts:
    """What `predict` has written to a table or to folders."""

    images: int = 0  # and frames of videos
    unreadable: int = 0
    none: int = 0  # without a class: all scores are below the threshold, or the model abstained
    not_copied: int = 0  # frames and images from standard input, which are not files that could be copied


@with_near_options
def predict(
    run: str | os.PathLike[str],
    images: Paths,
    *,
    top: int | None = None,
    threshold: float | None = None,
    csv: str | os.PathLike[str] | None = None,
    parquet: str | os.PathLike[str] | None = None,
    sort_into: str | os.PathLike[str] | None = None,
    every: int | None = None,
    out: str | os.PathLike[str] | None = None,
    index: str | os.PathLike[str] | None = None,
    level: str | None = None,
    neighbors: int | None = None,
    tta: bool = False,
    device: str = "auto",
) -> list[Any] | PredictionCounts:
    """Predict image files, folders and videos with a run, an artifact or published weights.

    Returns one prediction per image, with `path`, `answers` and `error` (None if the file could be read). With `csv`,
    `parquet` or `sort_into`, predictions are written there as they are made, and only their counts are returned, so
    that any number of images fits in memory. For images in memory use `patchloom.load(run).predict(images)`.

    run        Run or artifact folder, or published weights such as resmlp_s12:in1k.
    images     Image files, folders or videos; - reads paths or one image from standard input. Paths there are one per
               line or separated by NUL characters. An iterable is read lazily.
    top        Classes per image. Default: 3; of several labels, all that apply. Detectors list every object.
    threshold  Drop classes with a lower score; an image that keeps none is "none". Of masks: those with a smaller
               share of the pixels.
    csv        Write the predictions to a CSV file. It is replaced if it exists.
    parquet    Write the predictions to a parquet file. It is replaced if it exists.
    sort_into  Copy images into folders by class in this new folder. A folder is named after the first class of its
               images, or none.
    every      Use every N-th frame. Default: one per second of videos, all of animations.
    out        Folder for masks, boxes and overlays (segmentation and detection).
    index      Classify by the nearest files of this index of the run; needs no classifier.
    level      Level of the index's labels, fine for the finest. Default: the index's.
    neighbors  Files of the index that vote on each image. Default: 20.
    tta        Average the probabilities of each image and its mirror image (classifiers).
    device     'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' uses a GPU if there is one.
    """
    stream = PredictionStream(**locals())
    if csv is None and parquet is None and sort_into is None:
        return [_drop_pixels(prediction) for prediction in stream]
    for _ in stream:
        pass
    return stream.counts


class PredictionStream:
    """Predictions of one call of `predict`, made and written while they are iterated over."""

    def __init__(
        self,
        run: str | os.PathLike[str],
        images: Paths,
        *,
        top: int | None,
        threshold: float | None,
        csv: str | os.PathLike[str] | None,
        parquet: str | os.PathLike[str] | None,
        sort_into: str | os.PathLike[str] | None,
        every: int | None,
        out: str | os.PathLike[str] | None,
        index: str | os.PathLike[str] | None,
        level: str | None,
        neighbors: int | None,
        tta: bool,
        device: str,
    ) -> None:
        self.counts = PredictionCounts()
        if top is not None:
            at_least("top", top, 1)
        if threshold is not None and not 0 <= threshold <= 1:
            raise UsageError(f"threshold is {threshold}, expected a number from 0 to 1")
        self._images: Iterable[str | os.PathLike[str]] = _listed(images)
        self._outputs = [(name, Path(path)) for name, path in (("csv", csv), ("parquet", parquet)) if path is not None]
        self._sort_into = None if sort_into is None else Path(sort_into)
        self._check_outputs()
        by_index = {"index": index, "level": level, "neighbors": neighbors}
        by_score = {"--top": top, "--threshold": threshold, "--sort-into": sort_into}
        self._model, self._task = _open_model(os.fspath(run), by_index, by_score, tta, out, device)
        self._threshold = threshold
        keywords: dict[str, Any] = {**by_index, "out": out, "tta": tta or None}
        if option := self._task.model.threshold_option:
            keywords[option] = threshold
        top = self._task.model.most_answers if top is None else top
        self._keywords = {"top": top, "every": every} | {n: value for n, value in keywords.items() if value is not None}
        self.has_votes = index is not None  # predictions have the level and the votes of an index
        most = self._most_answers()
        self._answers = min(top or most or 1, most or top or 1)

    def __iter__(self) -> Iterator[Any]:
        """Yield each prediction after it was written. The files get their names when all are written."""
        with ExitStack() as stack:
            write = self._open_outputs(stack)
            paths = _Paths(self._images, stack)
            for made in self._model.predict_files(paths, **self._keywords):
                prediction = paths.named(self._above_threshold(_answered(made)))
                self._count(prediction)
                write(prediction)
                yield prediction

    def _check_outputs(self) -> None:
        """Raise UsageError for outputs that cannot be written, before the model is loaded."""
        for name, path in self._outputs:
            if path.suffix.lower() != f".{name}":
                raise UsageError(f"--{name} {path}: expected a file name that ends in .{name}")
            if os.path.lexists(path) and not path.is_file():
                raise UsageError(f"--{name} {path}: it exists and is not a file; choose another name")
        if self._sort_into is not None:
            from patchloom.runs.folders import refuse_taken  # loads networks

            refuse_taken(self._sort_into)
            target = os.path.realpath(self._sort_into)
            for folder in self._images if isinstance(self._images, Sequence) else ():
                if os.path.isdir(folder) and target.startswith(os.path.join(os.path.realpath(folder), "")):
                    raise UsageError(
                        f"--sort-into {self._sort_into} is inside {os.fspath(folder)}, whose images are predicted; "
                        "choose a folder outside of it"
                    )

    def _most_answers(self) -> int | None:
        """Return the most classes that an image can get, if that is known."""
        if not self.has_votes:
            return len(labels) if (labels := getattr(self._model, "labels", None)) else None
        from patchloom.inference.neighbors import NEIGHBORS

        return int(self._keywords.get("neighbors", NEIGHBORS))

    def _open_outputs(self, stack: ExitStack) -> Callable[[Any], None]:
        """Open the files and the folder; return the function that writes a prediction to all of them."""
        if not self._outputs and self._sort_into is None:
            return lambda _: None
        from patchloom.tasks import prediction_files  # not needed to print predictions

        loader = self._task.model
        columns = loader.columns(self._answers)
        if self.has_votes:
            columns = {"path": str, "level": str} | columns
        tables = [stack.enter_context(prediction_files.OPENERS[name](path, columns)) for name, path in self._outputs]
        sort = stack.enter_context(prediction_files.class_folders(self._sort_into)) if self._sort_into else None

        def write(prediction: Any) -> None:
            rows = loader.rows(prediction, self._answers)
            more = {name: getattr(prediction, name, "") for name in ("level", "reason")}
            more["error"] = prediction.error and prediction.error.removeprefix(f"{prediction.path}: ")
            for row in rows:
                for table in tables:
                    table(more | row)
            if sort and prediction.error is None:
                is_file = prediction.path != STDIN and sort(prediction.path, rows[0]["label"])
                self.counts.not_copied += not is_file

        return write

    def _above_threshold(self, prediction: Any) -> Any:
        """Return a prediction without the classes below the threshold, which a detector drops itself."""
        if self._threshold is None or self._task.model.threshold_option or prediction.error is not None:
            return prediction
        return replace(prediction, answers=[each for each in prediction.answers if each[1] >= self._threshold])

    def _count(self, prediction: Any) -> None:
        self.counts.images += 1
        self.counts.unreadable += prediction.error is not None
        self.counts.none += prediction.error is None and not prediction.answers


class _Paths:
    """The paths to predict, with those of standard input. Iterated over once."""

    def __init__(self, images: Iterable[str | os.PathLike[str]], stack: ExitStack) -> None:
        self._images, self._stack = images, stack
        self._from_stdin = ""  # the temporary file of an image that was read from standard input

    def __iter__(self) -> Iterator[str]:
        for path in self._images:
            name = os.fsdecode(path)
            if name == STDIN:
                yield from self._read_stdin()
            else:
                yield name

    def named(self, prediction: Any) -> Any:
        """Return a prediction with '-' in place of the temporary file of an image from standard input."""
        file = self._from_stdin
        if not file or not prediction.path.startswith(file):
            return prediction
        error = prediction.error and prediction.error.replace(file, STDIN)
        return replace(prediction, path=STDIN + prediction.path.removeprefix(file), error=error)

    def _read_stdin(self) -> Iterator[str]:
        stream: IO[bytes] = sys.stdin.buffer
        if stream.isatty():
            print("reading paths from standard input, one per line; Ctrl-D ends the list", file=sys.stderr, flush=True)
        first = stream.read(_SIGNATURE_BYTES)
        if not first:
            raise UsageError("standard input is empty; expected paths, one per line, or an image")
        kind = format_of(first)
        if kind is None or kind in _TEXT_LIKE:
            yield from paths_in(stream, first)
            return
        data = first + stream.read(MAX_FILE_BYTES)
        file = self._stack.enter_context(temporary_folder()) / f"image.{kind.lower()}"
        file.write_bytes(data)
        self._from_stdin = str(file)
        yield self._from_stdin


def paths_in(stream: IO[bytes], first: bytes = b"") -> Iterator[str]:
    """Yield the paths of a stream that begins with `first`: one per line, or as `find -print0` separates them."""
    rest, separator = first, b""
    while True:
        chunk = stream.read1(_CHUNK_BYTES)  # type: ignore[attr-defined]
        rest += chunk
        separator = separator or (b"\0" if b"\0" in rest else b"\n" if b"\n" in rest else b"")
        lines = rest.split(separator) if separator else [rest]
        rest = lines.pop() if chunk else b""
        if len(rest) > _MOST_OF_LINE:
            raise DataError(f"standard input: a line of more than {_MOST_OF_LINE:,} bytes is not a path")
        if not chunk or separator:
            yield from (os.fsdecode(line) for each in lines if (line := each.removesuffix(b"\r")))
        if not chunk:
            return


def _listed(images: Paths) -> Iterable[str | os.PathLike[str]]:
    """Return the paths of `images`; raise UsageError for anything else."""
    if isinstance(images, str | os.PathLike):
        return [images]
    in_memory = isinstance(images, bytes | bytearray) or not isinstance(images, Iterable) or hasattr(images, "shape")
    first = images[0] if isinstance(images, Sequence) and len(images) else None
    if in_memory or not isinstance(first, str | os.PathLike | None):
        kind = type(images if in_memory else first).__name__
        raise UsageError(f"images is of type {kind}, expected paths; use patchloom.load(run).predict(…) for {kind}")
    return images


def _answered(prediction: Any) -> Any:
    """Return a prediction without classes and with the reason if the model abstained."""
    reason = getattr(prediction, "abstained", "")
    return replace(prediction, answers=[], reason=reason) if reason else prediction


def _drop_pixels(prediction: Any) -> Any:
    """Return a prediction for a list, without the image that a detector keeps to draw on."""
    has_picture = any(field.name == "picture" for field in fields(prediction))
    return replace(prediction, picture=None) if has_picture else prediction


def _open_model(
    run: str,
    by_index: Mapping[str, Any],
    by_score: Mapping[str, Any],
    tta: bool,
    out: str | os.PathLike[str] | None,
    device: str,
) -> "tuple[Any, Task]":
    """Open a run or an artifact; return it with its task. Raise UsageError for options that it does not have."""
    folder, task, is_exported = _find_model(run)
    if out is not None and not task.model.writes_files:
        raise UsageError(f"--out {task.refusal}")
    scored = [option for option, value in by_score.items() if value is not None]
    if scored and not task.model.scores_classes:
        raise UsageError(f"{scored[0]} {task.refusal}")
    chosen = [f"--{name}" for name, value in by_index.items() if value is not None]
    if (others := chosen + ["--tta"] * tta) and not task.whole_images:
        raise UsageError(f"{others[0]} {task.refusal}")
    if is_exported and chosen:
        raise UsageError(f"{chosen[0]} needs a run to compare images; {run} is an artifact: give the run")
    return (task.model.open_artifact(folder) if is_exported else task.model.predictor(folder, device=device)), task


def _find_model(run: str) -> "tuple[Path, Task, bool]":
    """Return the folder of a run or artifact, its task, and whether it is an artifact."""
    if is_run(run):
        return Path(run), task_of_run(Path(run)), False
    from patchloom.runs.locate import local_copy, run_folder
    from patchloom_runtime.artifacts.metadata import is_artifact, read_about  # not needed for run folders

    run = local_copy(run)
    if is_artifact(run):
        return Path(run), task_named(read_about(Path(run)).task), True
    folder = run_folder(run)
    return folder, task_of_run(folder), False
