"""The verb `search` of a served index: nearest files, their vote for a class, and the level of each match."""

from collections.abc import Mapping, Sequence
from typing import Any

from patchloom.data.labels.taxonomy import FINEST, level_named
from patchloom.inference.neighbors import vote_shares


def search(index: Any, images: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the nearest files of an index, the vote of the first `neighbours`, and where each file matches it."""
    about, voters = index.about, options["neighbours"]
    level = about.level if options["level"] is None else level_named(options["level"], about.levels)
    results = []
    # At the finest level, whose labels determine those of every other level.
    for neighbors in index.search(list(images), top=max(options["top"], voters), level=FINEST):
        voting = [hit for hit in neighbors.hits[:voters] if hit.label]
        shares = vote_shares([hit.score for hit in voting], [hit.label for hit in voting])
        best = next(iter(shares), "")
        hits = [
            {
                "path": hit.path,
                "score": hit.score,
                "label": about.at(hit.label, level),
                "match": _match(about, hit.label, best),
                "thumbnail": None,  # filled in by the front process, see `thumbnails.py`
            }
            for hit in neighbors.hits[: options["top"]]
        ]
        votes: dict[str, float] = {}
        for label, share in shares.items():
            name = about.at(label, level)
            votes[name] = votes.get(name, 0.0) + share
        ordered = sorted(votes.items(), key=lambda vote: (-vote[1], vote[0]))
        answers = [{"label": name, "probability": min(1.0, share)} for name, share in ordered]
        results.append({"hits": hits, "level": level or FINEST, "answers": answers})
    return results


def index_facts(index: Any) -> dict[str, Any]:
    """Return the number of files of an index, its levels, and the level that is used by default."""
    levels = _levels(index.about)
    return {"files": len(index), "levels": levels, "level": index.about.level or next(iter(levels), "")}


def _levels(about: Any) -> list[str]:
    """Return the levels of an index's labels, finest first."""
    if not about.labels:
        return []
    above = sorted(about.levels, key=lambda level: -len(about.labels_at(level)))
    return [FINEST, *(level for level in above if level != FINEST)]


def _match(about: Any, label: str, best: str) -> str | None:
    """Return the finest level at which two labels have the same class, or None."""
    if not label or not best:
        return None

    def name_at(name: str, level: str) -> str:
        return str(about.at(name, level if level in about.levels else ""))

    return next((level for level in _levels(about) if name_at(label, level) == name_at(best, level)), None)
