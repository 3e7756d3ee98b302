"""Class folders in folders of coarser classes: train/animal/dog/*.jpg.

Folders inside class folders are more often days, cameras or sessions. They are classes where all images lie equally
deep, no innermost folder has two parents, some folder holds two of them, and val, where there is one, has some that
train has. Otherwise the outermost folders are the classes; a note says so where either could be meant.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Chain = tuple[str, ...]  # folders from the split down to one that holds images


@dataclass(frozen=True)
class Nesting:
    """The folders above each class, outermost first; `depth` counts the class's own too."""

    depth: int
    parents: dict[str, Chain]

    def levels(self) -> dict[str, dict[str, str]]:
        """coarse for one level above the classes; coarse1, coarse2 … upwards for more."""
        above = range(1, self.depth)
        names = {up: "coarse" if self.depth == 2 else f"coarse{up}" for up in above}
        return {names[up]: {fine: chain[-up] for fine, chain in self.parents.items()} for up in above}


def find_nesting(train: Iterable[Chain], val: Iterable[Chain] = ()) -> tuple[Nesting | None, str]:
    """From the folders of each split that hold images: the nesting or None, and a note or ''."""
    in_train, in_val = list(train), list(val)
    folders = [*in_train, *in_val]
    depths = sorted({len(chain) for chain in folders})
    if not depths or depths[-1] < 2:
        return None, ""
    inner = [chain for chain in folders if len(chain) == depths[-1]]
    parents: dict[str, Chain] = {}
    twice: dict[str, tuple[Chain, Chain]] = {}
    for chain in inner:
        first = parents.setdefault(chain[-1], chain[:-1])
        if first != chain[:-1]:
            twice[chain[-1]] = (first, chain[:-1])
    outer = {chain[0] for chain in inner}
    if len(parents) <= len(outer) or 2 * len(twice) >= len(parents):
        return None, ""
    if in_val and not {chain[-1] for chain in in_train} & {chain[-1] for chain in in_val}:
        return None, ""
    otherwise = "so the outermost folders are the classes; a taxonomy file can name inner ones (class,coarse)"
    if twice:
        name, (one, other) = next(iter(twice.items()))
        return None, f"folder {name!r} is in both {_path(one)} and {_path(other)}, {otherwise}"
    if len(depths) > 1:
        shallow = next(chain for chain in folders if len(chain) == depths[0])
        return None, f"images lie in {_path(shallow)} and in {_path(inner[0])}, not equally deep, {otherwise}"
    nesting = Nesting(depths[-1], parents)
    above = ", ".join(f"{level!r} ({len(set(of.values()))})" for level, of in nesting.levels().items())
    outermost = list(nesting.levels())[-1]
    said = (
        f"nested folders: {len(parents)} classes in the innermost, above them level{'s' * (nesting.depth > 2)} {above}"
    )
    return nesting, f"{said}; where the inner ones are no classes, train at level {outermost}"


def _path(chain: Sequence[str]) -> str:
    return repr("/".join(chain))
