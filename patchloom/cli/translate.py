"""`patchloom translate RUN [FILE]`: one translation per line, in order and as soon as it is ready."""

import gzip
import io
import os
import select
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, TextIO

import typer

from patchloom.cli.options import Device, Json
from patchloom.cli.streams import PIPE_CLOSED
from patchloom.options import Argument, Option
from patchloom_runtime.errors import DataError, UsageError

if TYPE_CHECKING:
    from patchloom_runtime.text.line_translator import LineTranslation

MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TranslateOptions:
    run: Annotated[str, Argument("Run folder of a translator.", complete="run")]
    file: Annotated[str | None, Argument("Text, one sentence per line, plain or .gz. Default: standard input.")] = None
    beams: Annotated[int | None, Option("Beams of the search; 1 is greedy. Default: the recipe's.")] = None
    length_penalty: Annotated[float | None, Option("Larger favors longer translations. Default: the recipe's.")] = None
    n_best: Annotated[int, Option("Translations per line; above 1, with their scores.", metavar="N")] = 1
    scores: Annotated[bool, Option("Print the score before each translation.")] = False
    batch: Annotated[int, Option("Sentences per batch.")] = 64
    out: Annotated[str | None, Option("File to write, complete or not at all.")] = None
    replace: Annotated[bool, Option("Replace bytes that are not UTF-8 by � instead of failing.")] = False
    device: Device = "auto"
    as_json: Json = False


def translate(options: TranslateOptions) -> None:
    """Translate lines of text. An empty line stays empty; a long one is translated in pieces.

    patchloom translate runs/corpus letters.txt --out letters.de.txt
    """
    from patchloom.cli.output import JsonList, results
    from patchloom.tasks.translation.model import load_translator

    translator = load_translator(options.run, device=options.device)
    translations_of = partial(
        translator.translate,
        beams=options.beams,
        length_penalty=options.length_penalty,
        batch=options.batch,
        n_best=options.n_best,
    )
    plain = getattr(results(), "rich_proxied_file", results())  # translations are printed without escaping
    if hasattr(plain, "reconfigure"):
        plain.reconfigure(encoding="utf-8")  # like the input, whatever the terminal's encoding is
    done, warned = 0, False
    with ExitStack() as stack:
        target = stack.enter_context(_atomic_text(options.out)) if options.out else plain
        json_list = JsonList(target) if options.as_json else None
        for group in _line_groups(options.file):
            texts, problem = _decode(group, done, options.replace, options.file or "standard input")
            for number, (source, best) in enumerate(zip(texts, translations_of(texts), strict=True), done + 1):
                with _exit_on_closed_pipe():
                    if json_list:
                        json_list.add(_as_json(number, source, best))
                    else:
                        print(_as_text(number, best, options), file=target, flush=not options.out)
                if best[0].untrained and not warned:
                    warned = True
                    why = f"line {number} has a sentence of more subwords than any of training ({translator.longest})"
                    print(f"note: {why}: do not trust its translation", file=sys.stderr)
            if problem:
                raise problem
            done += len(group)
        if json_list:
            json_list.close()


def _has_more(stream: BinaryIO) -> bool:
    """Return whether reading would not wait; False on Windows, where that is known of sockets alone."""
    return sys.platform != "win32" and bool(select.select([stream.fileno()], [], [], 0)[0])


@contextmanager
def _exit_on_closed_pipe() -> Iterator[None]:
    """Exit as any command does whose pipe was closed (click would exit with 1)."""
    try:
        yield
    except BrokenPipeError:
        raise typer.Exit(PIPE_CLOSED) from None


def _as_json(number: int, source: str, best: "list[LineTranslation]") -> dict[str, Any]:
    translations = [{"text": each.text, "score": each.score} for each in best]
    untrained = {"untrained": True} if best[0].untrained else {}
    return {"line": number, "source": source, "translations": translations, **untrained}


def _as_text(number: int, best: "list[LineTranslation]", options: TranslateOptions) -> str:
    if options.n_best > 1:
        return "\n".join(f"{number}\t{each.score:.4f}\t{each.text}" for each in best)
    return f"{best[0].score:.4f}\t{best[0].text}" if options.scores else best[0].text


def _decode(lines: list[bytes], before: int, replace: bool, name: str) -> tuple[list[str], DataError | None]:
    """Decode lines up to the first that is not text, and return the error of that line."""
    from patchloom.data.text.sentences import not_utf8

    texts = []
    for number, line in enumerate(lines, before + 1):
        try:
            texts.append(line.decode(errors="replace" if replace else "strict"))
        except UnicodeDecodeError as error:
            fault = f"{name}, line {number}: not UTF-8, {not_utf8(line, error)}"
            return texts, DataError(f"{fault}; convert it (iconv -t utf-8), or replace such bytes with --replace")
    return texts, None


def _line_groups(file: str | None) -> Iterator[list[bytes]]:
    """Yield groups of lines that are available together, each at most WINDOW lines."""
    from patchloom_runtime.text.line_translator import WINDOW

    if file is None:
        yield from _arriving_lines(sys.stdin.buffer, WINDOW)
        return
    try:
        with (gzip.open if file.endswith(".gz") else open)(file, "rb") as opened:
            lines = enumerate(iter(lambda: opened.readline(MAX_LINE_BYTES + 1), b""), 1)
            while group := [_checked_line(line, number, file) for number, line in islice(lines, WINDOW)]:
                yield group
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _checked_line(line: bytes, number: int, where: str) -> bytes:
    """Return a line without its end. A line far longer than a sentence is an error, before it fills the memory."""
    if len(line) > MAX_LINE_BYTES:
        raise DataError(f"{where}, line {number}: longer than {MAX_LINE_BYTES:,} bytes; expected one sentence per line")
    return line.rstrip(b"\r\n")


def _arriving_lines(stream: BinaryIO, most: int) -> Iterator[list[bytes]]:
    """Yield lists of at most `most` lines, as they arrive from a pipe or terminal.

    A program can write one line and read its translation before it writes the next.
    """
    lines: list[bytes] = []
    begun: list[bytes] = []  # pieces of a line whose end has not arrived
    ended = 0
    while data := os.read(stream.fileno(), 1 << 16):
        first, *others = data.split(b"\n")
        begun.append(first)
        if len(begun) * (1 << 16) > MAX_LINE_BYTES:
            _checked_line(b"".join(begun), ended + 1, "standard input")
        ended += len(others)
        if others:
            lines += [b"".join(begun), *others[:-1]]
            begun = [others[-1]]
        if len(lines) < most and _has_more(stream):
            continue
        while lines:
            yield [line.rstrip(b"\r") for line in lines[:most]]
            lines = lines[most:]
    if rest := b"".join(begun):
        lines.append(rest)
    while lines:
        yield [line.rstrip(b"\r") for line in lines[:most]]
        lines = lines[most:]


@contextmanager
def _atomic_text(path: str) -> Iterator[TextIO]:
    """Open a text file that appears when it is complete."""
    from patchloom.disk import atomic_file, open_new

    with (
        atomic_file(Path(path)) as temporary,
        io.TextIOWrapper(io.BufferedWriter(open_new(temporary)), encoding="utf-8", newline="\n") as file,
    ):
        yield file
