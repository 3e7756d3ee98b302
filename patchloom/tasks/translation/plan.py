"""The plan of a translation run: a text and, after the processes are connected, its sentences as token indices."""

from dataclasses import dataclass
from typing import Any

import torch

from patchloom.data.text.encoded import EncodedPairs
from patchloom.data.text.pairs import LeftOut, Pairs, ParallelText
from patchloom.models.cost import human
from patchloom.models.seq2seq import Seq2Seq, create_seq2seq
from patchloom.recipes.schema import Recipe
from patchloom.runs.provenance import LEFT_OUT
from patchloom.tasks.plan import Plan
from patchloom.tasks.provenance import changes_since
from patchloom_runtime.errors import UsageError
from patchloom_runtime.text.vocabulary import Vocabulary


@dataclass(frozen=True, eq=False)
class Corpus:
    """The text as token indices."""

    vocabulary: Vocabulary
    train: EncodedPairs
    val: EncodedPairs


@dataclass(frozen=True, kw_only=True)
class TextPlan(Plan):
    """A plan for a run on parallel text."""

    text: ParallelText
    corpus: Corpus | None = None
    lost: tuple[LeftOut, ...] = ()  # pairs that are not trained on

    @property
    def encoded(self) -> Corpus:
        """The text as token indices."""
        assert self.corpus is not None
        return self.corpus

    @property
    def examples(self) -> Pairs:
        return self.text.train

    @property
    def data_name(self) -> str:
        return f"{self.text.name}, {self.text.source} → {self.text.target}"

    def data_lines(self, *, dry_run: bool) -> list[str]:
        t, corpus = self.text, self.encoded
        assert self.record is not None
        tests = f"; tests: {', '.join(t.tests)}" if t.tests else ""
        lines = [
            f"data       {self.data_name}: {len(t.train):,} pairs to train on, {len(t.val):,} to validate{tests}",
            *(f"           note: {note}" for note in self.notes),
        ]
        if self.lost:
            first, listed = self.lost[0], "" if dry_run else f"; all in {self.folder / LEFT_OUT}"
            lines.append(f"left out   {len(self.lost):,} pairs of train, first {first.where}: {first.reason}{listed}")
        if corpus.val.left_out:
            first = corpus.val.left_out[0]
            count = f"{len(corpus.val.left_out):,} pairs of val have no loss"
            lines.append(f"           note: {count}, first {first.where}: {first.reason}")
        lines += [f"           note: {note}" for note in changes_since(self.folder, self.record)]
        with torch.device("meta"):
            count_all = sum(p.numel() for p in make_seq2seq(self.recipe, len(corpus.vocabulary)).parameters())
        note = f" ({corpus.vocabulary.note})" if corpus.vocabulary.note else ""
        subwords = f"{len(corpus.vocabulary):,} subwords{note}"
        return [*lines, f"model      {self.recipe.model.name}: {human(count_all)} parameters, {subwords}"]

    def data_facts(self) -> dict[str, Any]:
        return {
            "name": self.text.name,
            "languages": [self.text.source, self.text.target],
            "train": len(self.encoded.train),
            "val": len(self.encoded.val),
            "notes": list(self.notes),
        }


def make_seq2seq(recipe: Recipe, vocabulary: int) -> Seq2Seq:
    """Build the recipe's network for a number of subwords, with random weights."""
    part = recipe.model
    fixed: dict[str, Any] = {"vocabulary": vocabulary, "max_length": recipe.text.max_length, "dropout": part.dropout}
    if doubled := [name for name in fixed if name in part.options]:
        group = "model" if doubled[0] == "dropout" else "text"
        raise UsageError(f"model.options.{doubled[0]} is set by {group}.{doubled[0]}. Set that instead.")
    return create_seq2seq(part.name, **fixed | dict(part.options))
