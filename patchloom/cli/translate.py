"""`patchloom translate RUN [FILE]`: a line in, a line out, in their order and as soon as it is there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, TextIO

import typer

from patchloom.cli.verb import completed

if TYPE_CHECKING:
    from patchloom_runtime.errors import DataError
    from patchloom_runtime.text.line_translator import LineTranslation

MAX_LINE_BYTES = 1 << 20


def translate(
    run: Annotated[str, typer.Argument(help="Folder of a translation run.", autocompletion=completed("run"))],
    file: Annotated[
        str | None, typer.Argument(help="Text, one sentence per line, plain or .gz; standard input when left out.")
    ] = None,
    beams: Annotated[int | None, typer.Option(help="Hypotheses searched; the recipe's. 1 is greedy.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Larger favours longer translations.")] = None,
    n_best: Annotated[int, typer.Option(metavar="N", help="N translations per line: number, score, text.")] = 1,
    scores: Annotated[bool, typer.Option("--scores", help="Put its score before each translation.")] = False,
    batch: Annotated[int, typer.Option(help="Sentences translated together.")] = 64,
    out: Annotated[str | None, typer.Option(help="Write to a file, whole or not at all.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Bytes that are no UTF-8 become �, not an error.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda …; auto takes a GPU if there is one.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="For machines: a list with one object per line.")] = False,
) -> None:
    """Translate lines of text; an empty line stays empty, a long one is translated in pieces."""
    import sys
    from contextlib import ExitStack
    from functools import partial

    from patchloom.cli.output import JsonList, results
    from patchloom.tasks.translation.translator import load_translator

    translator = load_translator(run, device=device)
    found_of = partial(translator.translate, beams=beams, length_penalty=length_penalty, batch=batch, n_best=n_best)
    plain = getattr(results(), "rich_proxied_file", results())  # a translation is printed as it is
    if hasattr(plain, "reconfigure"):
        plain.reconfigure(encoding="utf-8")  # as what is read, whatever the terminal's is
    done, warned = 0, False
    with ExitStack() as stack:
        target = stack.enter_context(_written(out)) if out else plain
        listed = JsonList(target) if as_json else None
        for group in _groups(file):
            texts, problem = _decoded(group, done, replace, file or "standard input")
            for number, (source, found) in enumerate(zip(texts, found_of(texts), strict=True), done + 1):
                if listed:
                    with _read_or_left():
                        listed.add(_for_machines(number, source, found))
                else:
                    shown = _shown(number, found, scores=scores, several=n_best > 1)
                    with _read_or_left():
                        print(shown, file=target, flush=not out)
                if found[0].untrained and not warned:
                    warned = True
                    told = f"line {number} has a sentence of more subwords than any of training ({translator.longest})"
                    print(f"note: {told}: do not trust its translation", file=sys.stderr)
            if problem:
                raise problem
            done += len(group)
        if listed:
            listed.close()


@contextmanager
def _read_or_left() -> Iterator[None]:
    """Where nobody reads any more, leave as any command in a pipe does (click would say 1)."""
    import signal

    try:
        yield
    except BrokenPipeError:
        raise typer.Exit(128 + signal.SIGPIPE) from None


def _for_machines(number: int, source: str, found: "list[LineTranslation]") -> dict[str, Any]:
    answers = [{"text": each.text, "score": each.score} for each in found]
    untrained = {"untrained": True} if found[0].untrained else {}
    return {"line": number, "source": source, "translations": answers, **untrained}


def _shown(number: int, found: "list[LineTranslation]", *, scores: bool, several: bool) -> str:
    if several:
        return "\n".join(f"{number}\t{each.score:.4f}\t{each.text}" for each in found)
    return f"{found[0].score:.4f}\t{found[0].text}" if scores else found[0].text


def _decoded(lines: list[bytes], before: int, replace: bool, name: str) -> "tuple[list[str], DataError | None]":
    """Lines as text, up to the first that is none, and what is wrong with that."""
    from patchloom.data.text.sentences import not_utf8
    from patchloom_runtime.errors import DataError

    texts = []
    for number, line in enumerate(lines, before + 1):
        try:
            texts.append(line.decode(errors="replace" if replace else "strict"))
        except UnicodeDecodeError as error:
            told = f"{name}, line {number}: not UTF-8, {not_utf8(line, error)}"
            return texts, DataError(f"{told}; convert it (iconv -t utf-8), or let --replace stand in for such bytes")
    return texts, None


def _groups(file: str | None) -> Iterator[list[bytes]]:
    """Lines that are there together, at most a window of them."""
    import gzip
    import sys
    import zlib
    from itertools import islice

    from patchloom_runtime.errors import DataError, UsageError
    from patchloom_runtime.text.line_translator import WINDOW

    if file is None:
        yield from _arriving(sys.stdin.buffer, WINDOW)
        return
    try:
        with (gzip.open if file.endswith(".gz") else open)(file, "rb") as opened:
            lines = enumerate(iter(lambda: opened.readline(MAX_LINE_BYTES + 1), b""), 1)
            while group := [_whole(line, number, file) for number, line in islice(lines, WINDOW)]:
                yield group
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _whole(line: bytes, number: int, where: str) -> bytes:
    """The line without its end; one that is far longer than a sentence is an error, before it fills the memory."""
    from patchloom_runtime.errors import DataError

    if len(line) > MAX_LINE_BYTES:
        raise DataError(f"{where}, line {number}: longer than {MAX_LINE_BYTES:,} bytes; expected one sentence per line")
    return line.rstrip(b"\r\n")


def _arriving(stream: BinaryIO, most: int) -> Iterator[list[bytes]]:
    """Lines of a pipe or a terminal: as soon as one is there, it goes on with those that came with it.

    So whoever writes a line and waits for its translation gets it.
    """
    import os
    import select

    lines: list[bytes] = []
    begun: list[bytes] = []  # of a line whose end is not there yet
    ended = 0
    while data := os.read(stream.fileno(), 1 << 16):
        first, *others = data.split(b"\n")
        begun.append(first)
        if len(begun) * (1 << 16) > MAX_LINE_BYTES:
            _whole(b"".join(begun), ended + 1, "standard input")
        ended += len(others)
        if others:
            lines += [b"".join(begun), *others[:-1]]
            begun = [others[-1]]
        if len(lines) < most and select.select([stream.fileno()], [], [], 0)[0]:
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
def _written(path: str) -> Iterator[TextIO]:
    """A file that is there once all of it is."""
    import io
    from pathlib import Path

    from patchloom.disk import atomic_file, open_new

    with (
        atomic_file(Path(path)) as temporary,
        io.TextIOWrapper(io.BufferedWriter(open_new(temporary)), encoding="utf-8", newline="\n") as file,
    ):
        yield file
