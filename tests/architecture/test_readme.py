"""The tree in the tour is the repository's."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def tree() -> set[str]:
    """Paths named in the annotated tree of docs/internals/tour.md."""
    block = re.search(r"```text\n(\.\n├── .*?)```", (ROOT / "docs/internals/tour.md").read_text(), re.DOTALL)
    assert block, "the tour has no tree"
    paths, stack = set(), []
    for line in block[1].splitlines()[1:]:
        match = re.match(r"^((?:│   |    )*)[├└]── (\S+)", line)
        if not match:
            continue
        depth = len(match[1]) // 4
        stack = [*stack[:depth], match[2].rstrip("/")]
        paths.add("/".join(stack))
    return paths


def test_what_the_tree_names_exists() -> None:
    missing = [path for path in tree() if not (ROOT / path).exists()]
    assert missing == []


def test_every_folder_of_the_package_is_in_the_tree() -> None:
    named = tree()
    for package in ("patchloom", "runtime/patchloom_runtime"):
        folders = {p.parent.relative_to(ROOT) for p in (ROOT / package).rglob("*.py")}
        assert {str(folder) for folder in folders if len(folder.parts) <= 3} <= named


def test_every_path_in_the_architecture_pages_exists() -> None:
    pages = [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / "internals").glob("*.md")]
    places = (ROOT, ROOT / "patchloom", ROOT / "runtime")
    missing = [
        f"{page.name}: {path}"
        for page in pages
        for path in re.findall(r"`((?:\w+/)+\w+\.py)\b", page.read_text())
        if not any((place / path).exists() for place in places)
    ]
    assert missing == []
