"""Runs that translate: encoder and step of the decoder are graphs, the search for words is `artefact_translator.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import numpy as np

from patchloom.data.text.pairs import Pairs, open_parallel, open_splits
from patchloom.evaluation.translation import translation_scores
from patchloom.exporters.graph import Traced
from patchloom.exporters.parity import Outputs
from patchloom.exporters.subject import ExportSettings, ExportSubject, data_of
from patchloom.tasks.translation.graph import kept_of, traced_translator
from patchloom.tasks.translation.run_files import load_seq2seq
from patchloom.tasks.translation.translator import Translator
from patchloom_runtime.artifacts.line_translator import LineTranslator
from patchloom_runtime.artifacts.metadata import STEP, VOCABULARY, TranslationSettings
from patchloom_runtime.artifacts.translator import BeamSearch
from patchloom_runtime.engines.formats import MODEL, Graph, GraphFormat
from patchloom_runtime.errors import UsageError

TEXT, SCORE = "text", "score"
MOST_OTHERS = 0.01  # of the sentences: of two that are equally likely, either may be found


class TranslatorSubject(ExportSubject):
    """An answer is a sentence: the same if every letter is."""

    task = "translation"
    measure = "BLEU"
    precisions: ClassVar[tuple[str, ...]] = ("float32",)
    most = 200
    compared = "sentences"
    use = 'next(model.translate(["a line"]))[0].text  # lines in, the best translations of each out'

    def __init__(self, folder: Path, asked: ExportSettings) -> None:
        if asked.size is not None:
            raise UsageError("--size is of images; a translation run has none")
        network, files = load_seq2seq(folder)
        self.translator = Translator.of(network, files)
        self.network, self.labels, self.shown, self.notes = files.network, (), None, ()
        self.weights = sum(v.numel() * v.element_size() for v in network.state_dict().values())
        search = self.translator
        told = TranslationSettings(
            files.source, files.target, files.longest[0], network.config.max_length, kept_of(network), search.beams,
            search.length_penalty,
        )  # fmt: skip
        self._kept = told.kept
        self.told = {"translation": asdict(told)}
        self.answers = f"Translations from {files.source} to {files.target}."
        pairs = self._pairs(folder, asked, files.source, files.target)
        sources, targets = pairs.sources(), pairs.targets()
        chosen = np.unique(np.linspace(0, len(sources) - 1, min(asked.images or self.most, len(sources))).round())
        self.rows = np.array([sources[int(row)] for row in chosen], object)
        self._references = [targets[int(row)] for row in chosen]

    @staticmethod
    def _pairs(folder: Path, asked: ExportSettings, source: str, target: str) -> Pairs:
        place = asked.data or data_of(folder)
        if asked.split is None:
            return open_parallel(place, source=source, target=target).val
        return open_splits(place, source, target, asked.split)[asked.split]

    def files(self) -> Mapping[str, bytes]:
        """The subwords."""
        return {VOCABULARY: self.translator.vocabulary.to_bytes()}

    def in_words(self, outputs: Sequence[str]) -> str:
        """What the graphs take and give."""
        del outputs
        return (
            "`model` takes `source`, int64 (batch, subwords), and gives keys and values of each sentence; `step` takes "
            "the last words, their position and what the positions before have left, and gives logits of the next. "
            f"Subwords are sentencepiece's, in `{VOCABULARY}`."
        )

    def traced(self, *, half: bool) -> Sequence[Traced]:
        """The encoder and a step."""
        del half
        return traced_translator(self.translator.network)

    def opened(self, form: GraphFormat, folder: Path, threads: int) -> Graph:
        """Both parts, and the search."""
        graphs = {part: form.open(folder, threads, part) for part in (MODEL, STEP)}
        ours = _Searching(self.translator, graphs, self._kept)
        return lambda rows: _told(ours, rows)

    def run(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """As it answers `patchloom translate`."""
        return _told(self.translator, rows)

    def calibration(self, count: int) -> np.ndarray:
        """There is no int8 of it."""
        del count
        raise UsageError(f"a run of {self.task} is not quantised")

    def same(self, found: Outputs, expected: Outputs) -> float:
        """Of sentences."""
        return 100 * float((found[TEXT] == expected[TEXT]).mean())

    def differences(self, found: Outputs, expected: Outputs) -> tuple[float, float]:
        """Of the scores; as a share of the largest, or that of other sentences where these are more than allowed."""
        gap = float(np.abs(found[SCORE] - expected[SCORE]).max())
        share = gap / max(1.0, float(np.abs(expected[SCORE]).max()))
        others = 1 - self.same(found, expected) / 100
        return gap, share if others <= MOST_OTHERS else max(share, others)

    def right(self, found: Outputs) -> float | None:
        """BLEU of the sentences that are compared."""
        return dict(translation_scores(list(found[TEXT]), self._references, self.translator.target))["bleu"]


class _Searching(LineTranslator):
    """The run's own way with lines, over graphs."""

    def __init__(self, run: Translator, graphs: Mapping[str, Graph], kept: int) -> None:
        self.vocabulary, self.source, self.target, self.longest = run.vocabulary, run.source, run.target, run.longest
        self.most_tokens, self.beams, self.length_penalty = run.most_tokens, run.beams, run.length_penalty
        self._graphs, self._kept = graphs, kept

    def _search(self, pieces: Sequence[list[int]], beams: int, penalty: float, n_best: int) -> list:
        return BeamSearch(self._graphs, self.most_tokens, self._kept, beams, penalty).of_pieces(pieces, n_best)


def _told(translator: LineTranslator, rows: np.ndarray) -> dict[str, np.ndarray]:
    best = [found[0] for found in translator.translate(rows.tolist())]
    texts = np.array([one.text for one in best] or [""], object)[: len(best)]
    return {TEXT: texts, SCORE: np.array([one.score for one in best])}
