"""The reader of parallel text."""

from pathlib import Path
from typing import Any

from patchloom.data.checking.check import check
from patchloom.data.text.pairs import open_parallel
from patchloom_runtime.errors import DataError
from tests.reliability.readers.reader import Reader, checked


def make_text(seeds: Path, folder: Path) -> None:
    """Parallel text: two files, and a table."""
    (folder / "data").mkdir()
    for language, word in (("en", "house"), ("de", "Haus")):
        for split, count in (("train", 12), ("val", 4)):
            lines = [f"{split} {word} {'x ' * n}{n}" for n in range(count)]
            (folder / "data" / f"{split}.{language}").write_text("\n".join(lines) + "\n")


def read_text(seeds: Path, folder: Path) -> Any:
    """What `check` and training make of pairs of sentences."""
    report = check(str(folder / "data"), workers=1)
    text = open_parallel(str(folder / "data"), source="en", target="de")
    if told := report.problems():
        raise DataError("; ".join(told))
    return report.to_dict(), [list(text.train), list(text.val), text.left_out]


SENTENCES: dict[str, Reader] = {
    "sentences": Reader(make_text, read_text, {"data/*.en": "text", "data/*.de": "text"}, command=checked("data")),
}
