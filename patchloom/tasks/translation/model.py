"""A trained translator: maps lines of text to lines of text."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from patchloom.machine import resolve_device
from patchloom.models.beam_search import beam_search
from patchloom.models.seq2seq import Seq2Seq
from patchloom.recipes.parts import TextPart
from patchloom.runs.locate import is_on_hub, run_folder
from patchloom.tasks.task import ModelLoader
from patchloom.tasks.translation.run_files import (
    VAL,
    VOCABULARY,
    TranslationFiles,
    load_seq2seq,
    read_translation_files,
    read_val,
)
from patchloom_runtime.errors import UsageError, with_near_options
from patchloom_runtime.text.line_translator import (
    MAX_LENGTH_A,
    MAX_LENGTH_B,
    Hypothesis,
    LineTranslation,
    LineTranslator,
)
from patchloom_runtime.text.vocabulary import EOS, PAD, Vocabulary


class Translator(LineTranslator):
    """A translation network with its vocabulary and languages."""

    def __init__(
        self,
        network: Seq2Seq,
        vocabulary: Vocabulary,
        *,
        languages: tuple[str, str],
        longest: int,
        search: TextPart | None = None,
    ) -> None:
        self.network, self.vocabulary = network, vocabulary
        self.source, self.target = languages
        self.longest = longest  # subwords of the longest source in training
        self.search = search or TextPart()
        self.most_tokens = network.config.max_length
        self.beams, self.length_penalty = self.search.beams, self.search.length_penalty

    @classmethod
    def of(cls, network: Seq2Seq, files: TranslationFiles) -> "Translator":
        """Return the translator of a run."""
        return cls(
            network,
            files.vocabulary,
            languages=(files.source, files.target),
            longest=files.longest[0],
            search=files.recipe.text if files.recipe else None,
        )

    def _search(self, pieces: Sequence[list[int]], beams: int, penalty: float, n_best: int) -> list[list[Hypothesis]]:
        width = max(map(len, pieces)) + 1
        rows = [[*ids, EOS] + [PAD] * (width - 1 - len(ids)) for ids in pieces]
        source = torch.tensor(rows, device=self.network.embedding.weight.device)
        return beam_search(
            self.network,
            source,
            beams=beams,
            length_penalty=penalty,
            max_length_a=MAX_LENGTH_A,
            max_length_b=MAX_LENGTH_B,
            n_best=n_best,
            stop_early=False,
        )


@with_near_options
def translate(
    run: str | Path,
    lines: Iterable[str],
    *,
    beams: int | None = None,
    length_penalty: float | None = None,
    n_best: int = 1,
    batch: int = 64,
    device: str = "auto",
) -> list[str] | list[list[LineTranslation]]:
    """Translate lines of text with a run; with `n_best` above 1, return that many translations per line, with scores.

    run             Run folder of a translator.
    lines           Lines of text, one sentence each.
    beams           Beams of the search; 1 is greedy. Default: the recipe's.
    length_penalty  Larger favors longer translations. Default: the recipe's.
    n_best          Translations per line; above 1, with their scores.
    batch           Sentences per batch.
    device          'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' uses a GPU if there is one.
    """
    if isinstance(lines, str):
        raise UsageError("lines is a text; expected a list of lines: text.splitlines()")
    translator = load_translator(run, device=device)
    best = translator.translate(lines, beams=beams, length_penalty=length_penalty, batch=batch, n_best=n_best)
    return [line[0].text for line in best] if n_best == 1 else list(best)


@with_near_options
def load_translator(folder: str | Path, *, device: str = "auto") -> Translator:
    """Load the translator of a run folder or of a repository of the Hugging Face hub, 'hub:user/name'."""
    network, files = load_seq2seq(run_folder(folder) if is_on_hub(folder) else Path(folder))
    device = resolve_device(device)
    return Translator.of(network.to(device), files)


class TranslatorLoader(ModelLoader):
    """Models that translate sentences."""

    def load_network(self, folder: Path) -> Seq2Seq:
        return load_seq2seq(folder)[0]

    def load(self, folder: Path, *, device: str = "auto") -> Translator:
        return load_translator(folder, device=device)

    def predictor(self, folder: Path, *, device: str = "auto") -> Any:
        """Raise UsageError: `predict` is about images."""
        del device
        raise UsageError(f"{folder} translates text, not images; use `patchloom translate` or `evaluate --text`")

    def open_artifact(self, folder: Path) -> Any:
        """Raise UsageError: `predict` is about images."""
        return self.predictor(folder)

    def readers(self, folder: Path) -> dict[str, Callable[[], object]]:
        return {VOCABULARY: lambda: read_translation_files(folder), VAL: lambda: read_val(folder)}
