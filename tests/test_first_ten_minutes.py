"""A stranger with a folder of photos who reads only the page of tutorials: its commands, as they stand there.

The folder is as people have them: classes in folders of uneven depth, train, val and test, lists of labels beside them.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.messages import missing
from tests.reliability.commands import Done, command

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "Fruit/Apple/Golden-Delicious": (230, 210, 60),
    "Fruit/Apple/Granny-Smith": (60, 200, 60),
    "Fruit/Banana": (250, 240, 20),
    "Packages/Milk/Oat-Milk": (200, 200, 240),
    "Packages/Milk/Soy-Milk": (30, 90, 220),
    "Vegetables/Leek": (10, 110, 40),
}
COUNTS = {"train": 8, "val": 3, "test": 4}


def groceries(root: Path, seed: int = 0) -> Path:
    """Photos of groceries, with the lists that are downloaded with them."""
    coarse = sorted({folder.split("/")[1] for folder in FOLDERS})
    for split, count in COUNTS.items():
        lines = []
        for number, (folder, color) in enumerate(FOLDERS.items()):
            (root / split / folder).mkdir(parents=True)
            for i in range(count):
                noise = np.random.default_rng((seed, number, [*COUNTS].index(split), i)).normal(0, 30, (9, 8, 3))
                pixels = np.clip(np.array(color) + noise, 0, 255).astype(np.uint8)
                path = f"{split}/{folder}/{Path(folder).name}_{i:03d}.png"
                Image.fromarray(pixels).save(root / path)
                lines.append(f"{path}, {number}, {coarse.index(folder.split('/')[1])}\n")
        (root / f"{split}.txt").write_text("".join(lines))
    (root / "classes.csv").write_text(
        "Class Name (str), Class ID (int), Coarse Class Name (str), Coarse Class ID (int)\n"
        + "".join(
            f"{Path(folder).name},{number},{folder.split('/')[1]},{coarse.index(folder.split('/')[1])}\n"
            for number, folder in enumerate(FOLDERS)
        )
    )
    return root


def page_commands(heading: str) -> list[str]:
    """The commands of the first block under a heading, without their comments."""
    text = (ROOT / "docs/tutorials/index.md").read_text()
    block = re.search(rf"## {heading}\n.*?```bash\n(.*?)```", text, re.DOTALL)
    assert block, f"docs/tutorials/index.md has no commands under {heading}"
    return [line.split("#")[0].strip() for line in block[1].splitlines() if line.strip()]


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """Types a command in an empty folder beside photos/ and new.jpg."""
    groceries(tmp_path / "photos")
    shutil.copy(tmp_path / "photos/test/Fruit/Banana/Banana_000.png", tmp_path / "new.jpg")
    monkeypatch.chdir(tmp_path)
    return lambda line: command(tuple(shlex.split(line)[1:]), monkeypatch, capsys)


def name_of(folder: str) -> str:
    return Path(folder).name


def test_the_walk(typed, tmp_path) -> None:
    """One after the other, since each command needs what those before it left."""
    the_page_as_it_stands(typed, tmp_path)
    the_same_answers_everywhere(typed)
    other_runs(typed, tmp_path)


def the_page_as_it_stands(typed, place: Path) -> None:
    done: dict[str, Done] = {}
    for line in page_commands("The first ten minutes"):
        # The one thing that is changed: nobody waits ten minutes for a test.
        done[line] = typed(line.replace("--time 10m", "--time 5s").replace("--epochs 30", "--epochs 2"))
        assert done[line].code == 0, f"{line}\n{done[line].output}\n{done[line].errors}"
    said = {line: end.output for line, end in done.items()}
    assert missing(said["patchloom check photos/"], 6, 48, 18, 24) == []
    plan = said["patchloom train photos/ --dry-run"].splitlines()
    assert any(missing(line, 24, "patchloom evaluate runs/photos photos/ --split test") == [] for line in plan)
    assert any(missing(line, 6, "coarse1", 4, "coarse2", 3) == [] for line in plan)
    for page in ("runs/photos/report.html", "runs/photos/report-test.html", "runs/photos/look.html", "found.html"):
        assert (place / page).stat().st_size > 10_000
    tested = (place / "runs/photos/report-test.html").read_text()
    assert "test" in tested.partition('<section id="summary">')[2].partition("</section>")[0]
    assert tested.count("coarse1") == 1  # the note on the nested folders, once


def the_same_answers_everywhere(typed) -> None:
    classes = {*map(name_of, FOLDERS)}
    measured = json.loads(typed("patchloom evaluate runs/photos photos/ --split test --json").output)
    assert measured["images"] == 24, measured
    answers = json.loads(typed("patchloom predict runs/photos photos/test/Packages --json").output)
    assert len(answers) == 8
    assert {name for answer in answers for name, _ in answer["answers"]} <= classes
    built = json.loads(typed("patchloom index runs/photos photos/ --out photos.index --json").output)
    assert set(built["labels"]) == classes
    listed = json.loads(typed("patchloom check photos/ --labels photos/train.txt --json").output)
    assert listed["splits"] == {"train": 48, "val": 18, "test": 24}
    assert set(listed["classes"]) == classes
    assert typed("patchloom verify runs/photos").code == typed("patchloom verify photos.index").code == 0


def other_runs(typed, place: Path) -> None:
    weights = place / "runs/other/weights.safetensors"
    before = weights.stat().st_mtime_ns
    again = typed("patchloom train photos/ --epochs 2 --out runs/other")  # finished before
    assert again.code == 0, again.errors
    assert weights.stat().st_mtime_ns == before
    groceries(place / "elsewhere" / "photos", seed=1)
    elsewhere = json.loads(typed("patchloom train elsewhere/photos --epochs 1 --json").output)
    assert elsewhere["folder"] == "runs/photos-2"
    coarse = json.loads(typed("patchloom train photos/ --level coarse1 --init runs/photos --epochs 1 --json").output)
    assert coarse["folder"] == "runs/photos-3"
    levels = typed("patchloom evaluate runs/photos-3 photos/ --levels --json")
    assert levels.code == 0, levels.errors
