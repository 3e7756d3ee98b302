"""Preparing WMT'14 English–German and English–French from the official files, as plain files for `pairs.py`.

The corpora, the limits (1 … 250, ratio 1.5) and the tests are those of fairseq's preparation, after Ott et al. 2018.
Differences, because subwords are learned from raw text here:
- the text is not tokenized; typographic quotation marks, dashes and apostrophes become ASCII ones, in train, in a val
taken
  from it, and in the sources of newstest, but never in its references;
- lengths are counted in words and punctuation marks, there in subwords: set max_ratio=1.5 in training for that limit
too;
- val of En-De is newstest2013, as in the papers, or every n-th line with `val_every` (the script: 100).
"""

import html
import json
import re
import shutil
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from patchloom.data.text.pairs import LeftOut, Pairs, read_pairs
from patchloom.data.text.sentences import SentenceSplit, not_utf8, parallel_split
from patchloom.data.text.words import normalize_punctuation, words
from patchloom.disk import make_folder, rename, sync_folder, sync_tree, temporary_path
from patchloom_runtime.errors import DataError, ResourceError, UsageError, nearest
from patchloom_runtime.printable import table_cell
from patchloom_runtime.text.vocabulary import clean

MAX_WORDS, MAX_RATIO = 250, 1.5
_WMT13, _WMT14 = "https://www.statmt.org/wmt13/", "https://www.statmt.org/wmt14/"
_EUROPARL, _CRAWL = f"{_WMT13}training-parallel-europarl-v7.tgz", f"{_WMT13}training-parallel-commoncrawl.tgz"
_NEWS, _TESTS = f"{_WMT14}training-parallel-nc-v9.tgz", f"{_WMT14}test-full.tgz"


@dataclass(frozen=True)
class _Pair:
    other: str  # the language paired with English
    corpora: dict[str, str]  # file name without language → the archive that contains it
    test: str
    val: str  # "" if val is taken from train
    val_every: int


_PAIRS = {
    "en-de": _Pair(
        other="de",
        corpora={"europarl-v7.de-en": _EUROPARL, "commoncrawl.de-en": _CRAWL, "news-commentary-v9.de-en": _NEWS},
        test="newstest2014-deen",
        val="newstest2013",
        val_every=0,
    ),
    "en-fr": _Pair(
        other="fr",
        corpora={
            "europarl-v7.fr-en": _EUROPARL,
            "commoncrawl.fr-en": _CRAWL,
            "undoc.2000.fr-en": f"{_WMT13}training-parallel-un.tgz",
            "news-commentary-v9.fr-en": _NEWS,
            "giga-fren.release2.fixed": "https://www.statmt.org/wmt10/training-giga-fren.tar",
        },
        test="newstest2014-fren",
        val="",
        val_every=1333,
    ),
}
_DEV = f"{_WMT14}dev.tgz"


@dataclass(frozen=True)
class Prepared:
    """A summary of what was written, also saved as prepared.json."""

    pair: str
    counts: dict[str, int]  # split → pairs
    left_out: dict[str, int]  # reason → pairs; left_out.tsv lists them by file and line
    files: tuple[str, ...]  # read


def prepare_wmt14(folder: Path, pair: str, out: Path, *, val_every: int | None = None) -> Prepared:
    """Write train, val and test of `pair` into the new folder `out`, completely or not at all.

    The official archives must be unpacked anywhere below `folder`; files may be gzipped. With `val_every`, every n-th
    line of train becomes val, whatever the pair's usual val is.
    """
    if pair not in _PAIRS:
        known = list(_PAIRS)
        raise UsageError(f"WMT'14 {pair!r} is not supported; expected {' or '.join(known)}.{nearest(pair, known)}")
    if val_every is not None and val_every < 2:
        raise UsageError(f"val_every is {val_every}; expected 2 or more, or nothing for the usual val")
    if out.exists():
        raise UsageError(f"{out} already exists. Choose another folder, or delete it first")
    chosen = _PAIRS[pair]
    files = _find(folder, chosen, needs_val=val_every is None and bool(chosen.val))
    writing = temporary_path(out)
    try:
        make_folder(writing)
        prepared = _write(writing, pair, chosen, files, chosen.val_every if val_every is None else val_every)
        (writing / "prepared.json").write_bytes((json.dumps(asdict(prepared), indent=2) + "\n").encode())
        sync_tree(writing)
        rename(writing, out)
        sync_folder(out.parent)
    except OSError as error:
        raise ResourceError(f"{out} cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return prepared


def read_sgm(file: Path) -> dict[tuple[str, str], str]:
    """Return the segments of a test file in order, by document and number."""
    segments: dict[tuple[str, str], str] = {}
    document = ""
    for match in re.finditer(
        r'<doc\b[^>]*\bdocid="([^"]*)"|<seg\b[^>]*\bid="([^"]*)"[^>]*>(.*?)</seg>', _text(file), re.S | re.I
    ):
        if match[1] is not None:
            document = match[1]
        else:
            segments[document, match[2]] = clean(html.unescape(match[3]))
    if not segments:
        raise DataError(f"{file}: no <seg id=…> found; expected a test set in SGML")
    return segments


def _text(file: Path) -> str:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error
    lines = []
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            lines.append(line.decode())
        except UnicodeDecodeError as error:
            raise DataError(f"{file}, line {number}: not UTF-8, {not_utf8(line, error)}") from error
    return "\n".join(lines)


def _find(folder: Path, pair: _Pair, needs_val: bool) -> dict[str, Path]:
    """Return every required official file by name. Raise one DataError that lists all missing files."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; expected the one with the unpacked archives of WMT'14")
    there = {path.name: path for path in sorted(folder.rglob("*"), reverse=True) if path.is_file()}
    languages = ("en", pair.other)
    needed = {f"{corpus}.{language}": archive for corpus, archive in pair.corpora.items() for language in languages}
    needed |= {f"{pair.test}-src.en.sgm": _TESTS, f"{pair.test}-ref.{pair.other}.sgm": _TESTS}
    if needs_val:
        needed |= {f"{pair.val}.{language}": _DEV for language in languages}
    files = {name: there[kind] for name in needed for kind in (f"{name}.gz", name) if kind in there}
    missing: dict[str, list[str]] = {}
    for name in needed.keys() - files.keys():
        missing.setdefault(needed[name], []).append(name)
    if missing:
        lines = [
            f"{', '.join(sorted(names))} from {archive}" + " (found, unpack it)" * (Path(archive).name in there)
            for archive, names in sorted(missing.items())
        ]
        raise DataError(f"{folder} lacks {'; '.join(lines)}")
    return files


def _write(folder: Path, pair: str, chosen: _Pair, files: dict[str, Path], val_every: int) -> Prepared:
    other = chosen.other
    # All files are checked before the first line is written.
    test = _test_pairs(files[f"{chosen.test}-src.en.sgm"], files[f"{chosen.test}-ref.{other}.sgm"])
    val = Pairs(()) if val_every else read_pairs([_split(chosen.val, other, files)], "en", other)
    train = read_pairs([_split(corpus, other, files) for corpus in chosen.corpora], "en", other)
    left_out: list[LeftOut] = []
    with ExitStack() as stack:
        splits = {name: stack.enter_context(_Writer(folder, name, other)) for name in ("train", "val", "test")}
        for number, (raw_source, raw_target) in enumerate(train):
            source, target = normalize_punctuation(raw_source), normalize_punctuation(raw_target)
            if reason := _unfit(len(words(source, "en")), len(words(target, other))):
                left_out.append(LeftOut(train.where(number), reason))
            else:
                splits["val" if val_every and (number + 1) % val_every == 0 else "train"].add(source, target)
        for name, pairs in (("val", val), ("test", test)):
            for source, target in pairs:
                splits[name].add(normalize_punctuation(source), target)
    with (folder / "left_out.tsv").open("w", encoding="utf-8", newline="\n") as table:
        table.writelines(f"{table_cell(entry.where)}\t{table_cell(entry.reason)}\n" for entry in left_out)
    kinds = Counter(re.sub(r"\d+ and \d+ words, ", "", entry.reason) for entry in left_out)
    counts = {name: writer.count for name, writer in splits.items()}
    for name, count in counts.items():
        if not count:
            raise DataError(f"No pairs are left for {name}: {len(left_out):,} of train were skipped")
    return Prepared(pair, counts, dict(kinds), tuple(str(path) for path in sorted(set(files.values()))))


def _split(name: str, other: str, files: dict[str, Path]) -> SentenceSplit:
    return parallel_split(name, [(language, files[f"{name}.{language}"]) for language in ("en", other)])


def _test_pairs(source: Path, reference: Path) -> list[tuple[str, str]]:
    sources, references = read_sgm(source), read_sgm(reference)
    if list(sources) != list(references):
        raise DataError(
            f"{source} has {len(sources):,} segments, {reference} {len(references):,}, and their documents and numbers "
            "are not the same; unpack the archive again"
        )
    return list(zip(sources.values(), references.values(), strict=True))


def _unfit(source: int, target: int) -> str:
    """Return why a pair is skipped, or ""."""
    if not source or not target:
        return "empty sentence"
    if max(source, target) > MAX_WORDS:
        return f"{source} and {target} words, more than {MAX_WORDS}"
    if max(source, target) > MAX_RATIO * min(source, target):
        return f"{source} and {target} words, a ratio above {MAX_RATIO:g}"
    return ""


class _Writer:
    """The two files of a split."""

    def __init__(self, folder: Path, name: str, other: str) -> None:
        self._paths = [folder / f"{name}.{language}" for language in ("en", other)]
        self.count = 0

    def __enter__(self) -> "_Writer":
        self._files = [path.open("w", encoding="utf-8", newline="\n") for path in self._paths]
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            file.close()

    def add(self, source: str, target: str) -> None:
        """Write one line each: cleaned text has no line breaks."""
        for file, text in zip(self._files, (source, target), strict=True):
            file.write(text + "\n")
        self.count += 1
