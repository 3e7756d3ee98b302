"""Nested class folders.

    fruit/apple/golden-delicious/*.jpg
    fruit/banana/*.jpg

The innermost folders with images are the classes and the folders above them are levels, even if depths differ. A folder
that contains images is a class, with everything below it. Folders inside class folders may also be days, cameras or
sessions. The outermost folders are therefore the classes if there are no more inner names than outer ones, if at least
half of the inner names are in several folders, or if val has none of train's inner folders. A note reports the choice
and what the other one (`--classes`) would give.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from patchloom_runtime.printable import plural

Chain = tuple[str, ...]  # folders from the split down to one with images


@dataclass(frozen=True)
class Nesting:
    """Class folders with their class names. `depth` is the depth of the deepest one in train."""

    classes: dict[Chain, str]
    depth: int
    moved: dict[Chain, Chain] = field(default_factory=dict)  # class folders of val and test → those of train

    def class_of(self, folder: Chain) -> str:
        """Return the class of a folder or of a folder above it, or ''."""
        above = (folder[: n + 1] for n in range(len(folder)))
        ways = (self.moved.get(part, part) for part in above)
        return next((self.classes[part] for part in ways if part in self.classes), "")

    def levels(self) -> dict[str, dict[str, str]]:
        """Return the levels above the classes: coarse, or from fine to coarse coarse1, coarse2 …

        A class maps to its ancestor at the depth of the level, or to itself if its path is shorter.
        """
        levels = {}
        for up in range(1, self.depth):
            names = unique_names({chain[: self.depth - up] for chain in self.classes})
            # A class keeps its name, unless a folder of the level has the same one.
            own = {part: max(self.classes.get(part, ""), name, key=len) for part, name in names.items()}
            level = "coarse" if self.depth == 2 else f"coarse{up}"
            levels[level] = {name: own[chain[: self.depth - up]] for chain, name in self.classes.items()}
        return levels


def find_nesting(
    train: Iterable[Chain],
    val: Iterable[Chain] = (),
    test: Iterable[Chain] = (),
    choice: Literal["innermost", "outermost"] | None = None,
) -> tuple[Nesting | None, str]:
    """Return the nesting of folders with images, or None if the outermost are the classes, and a note or ''."""
    in_train = _class_folders(train)
    in_val = _class_folders(val, in_train)
    depth = max(map(len, in_train), default=0)
    if depth < 2:
        return None, ""
    held_out = {*in_val, *_class_folders(test, in_train)} - {*in_train}
    moved = _moved(held_out, in_train)
    nesting = Nesting(unique_names({*in_train, *held_out} - {*moved}), depth, moved)
    inner, outer = len(in_train), len({chain[0] for chain in in_train})
    why = _why_outermost(in_train, in_val) if choice is None else ""
    if choice == "outermost" or why:
        note = f"nested folders: {plural(outer, 'class')} (outermost folders){', since ' + why if why else ''}"
        return None, f"{note}; --classes innermost reads them as {inner} classes" if inner != outer else ""
    known = {nesting.classes[chain] for chain in in_train}
    counts = {
        level: len({coarse for name, coarse in of.items() if name in known}) for level, of in nesting.levels().items()
    }
    above = f"level{'s' * (depth > 2)} " + ", ".join(f"{level} ({count})" for level, count in counts.items())
    note = f"nested folders: {inner} classes (innermost folders), {above}"
    if moved:
        one, other = min(moved.items())
        more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
        note += f"; the same class, one level apart in train: {'/'.join(one)} = {'/'.join(other)}{more}"
    return nesting, f"{note}; --classes outermost reads them as {outer} classes"


def _class_folders(folders: Iterable[Chain], known: Iterable[Chain] = ()) -> list[Chain]:
    """Return the outermost folders with images; a folder inside a known class counts as that class."""
    known_folders, classes = set(known), dict[Chain, None]()
    for folder in sorted(folders, key=lambda chain: (len(chain), chain)):
        inside = (folder[:n] for n in range(1, len(folder) + 1) if folder[:n] in known_folders or folder[:n] in classes)
        classes[next(inside, folder)] = None
    return list(classes)


def _moved(held_out: Iterable[Chain], train: Sequence[Chain]) -> dict[Chain, Chain]:
    """Map class folders of val and test to those of train that differ only by one folder above the class."""
    known = set(train)
    longer: dict[Chain, list[Chain]] = {}
    for chain in train:
        for shorter in _drop_one(chain):
            longer.setdefault(shorter, []).append(chain)
    candidates = {chain: {*longer.get(chain, ()), *(known & {*_drop_one(chain)})} for chain in held_out}
    return {chain: next(iter(of)) for chain, of in candidates.items() if len(of) == 1}


def _drop_one(chain: Chain) -> list[Chain]:
    """Return the chains with one of the folders above the last removed."""
    return [chain[:i] + chain[i + 1 :] for i in range(len(chain) - 1)]


def _why_outermost(train: Sequence[Chain], val: Sequence[Chain]) -> str:
    """Return why inner folders are likely days, cameras or sessions, or '' if they are classes."""
    inner = [chain for chain in {*train, *val} if len(chain) > 1]
    parents: dict[str, set[Chain]] = {}
    for chain in inner:
        parents.setdefault(chain[-1], set()).add(chain[:-1])
    several = sum(len(folders) > 1 for folders in parents.values())
    if several and 2 * several >= len(parents):
        return f"{several} of {len(parents)} inner names are in several folders"
    if len(parents) <= len({chain[0] for chain in inner}):
        return "there are no more inner names than outer ones"
    in_train, in_val = ({chain[-1] for chain in split if len(chain) > 1} for split in (train, val))
    return "val has none of train's inner folders" if val and not in_train & in_val else ""


def unique_names(chains: Iterable[Chain]) -> dict[Chain, str]:
    """Name each chain by its last folder, preceded by as many parents as it takes to be unique.

    For example, juice/orange and fruit/orange.
    """
    by_name: dict[str, list[Chain]] = {}
    for chain in sorted(chains):
        by_name.setdefault(chain[-1], []).append(chain)
    names = {}
    for same in by_name.values():
        parts = 1
        while len({chain[-parts:] for chain in same}) < len(same):
            parts += 1
        names.update({chain: "/".join(chain[-parts:]) for chain in same})
    return names
