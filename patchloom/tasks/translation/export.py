"""Export of translation runs. Encoder and decoder step are graphs; the artifact runs the beam search."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import numpy as np

from patchloom.data.text.pairs import Pairs, open_parallel, open_splits
from patchloom.evaluation.translation import translation_scores
from patchloom.exporters.formats import GraphFormat
from patchloom.exporters.graph import GraphPart, state_bytes
from patchloom.exporters.parity import Outputs
from patchloom.exporters.subject import ExportSettings, ExportSubject, data_of
from patchloom.tasks.translation.graph import state_size, translator_parts
from patchloom.tasks.translation.model import Translator
from patchloom.tasks.translation.run_files import load_seq2seq
from patchloom_runtime.artifacts.translator import STEP, VOCABULARY, BeamSearch, TranslationSettings
from patchloom_runtime.engines.engine import MODEL, Graph
from patchloom_runtime.errors import UsageError
from patchloom_runtime.text.line_translator import Hypothesis, LineTranslator

TEXT, SCORE = "text", "score"
MOST_OTHERS = 0.01  # of the sentences: of two equally likely translations, either may win


class TranslatorSubject(ExportSubject):
    """A translator, compared by its sentences: equal if every letter is."""

    task = "translation"
    measure = "BLEU"
    precisions: ClassVar[tuple[str, ...]] = ("float32",)
    most = 200
    compared = "sentences"
    usage = 'next(model.translate(["a line"]))[0].text  # lines in, the best translations of each out'

    def __init__(self, folder: Path, settings: ExportSettings) -> None:
        if settings.size is not None:
            raise UsageError("--size applies to images; a translation run has none")
        network, files = load_seq2seq(folder)
        self.translator = Translator.of(network, files)
        self.network, self.labels, self.preprocessing, self.notes = files.network, (), None, ()
        self.weights = state_bytes(network)
        self._state_size = state_size(network)
        translation = TranslationSettings(
            files.source,
            files.target,
            files.longest[0],
            network.config.max_length,
            self._state_size,
            self.translator.beams,
            self.translator.length_penalty,
        )
        self.metadata = {"translation": asdict(translation)}
        self.summary = f"Translations from {files.source} to {files.target}."
        pairs = self._pairs(folder, settings, files.source, files.target)
        sources, targets = pairs.sources(), pairs.targets()
        chosen = np.unique(np.linspace(0, len(sources) - 1, min(settings.images or self.most, len(sources))).round())
        self.rows = np.array([sources[int(row)] for row in chosen], object)
        self._references = [targets[int(row)] for row in chosen]

    @staticmethod
    def _pairs(folder: Path, settings: ExportSettings, source: str, target: str) -> Pairs:
        data = settings.data or data_of(folder)
        if settings.split is None:
            return open_parallel(data, source=source, target=target).val
        return open_splits(data, source, target, settings.split)[settings.split]

    def files(self) -> Mapping[str, bytes]:
        return {VOCABULARY: self.translator.vocabulary.to_bytes()}

    def describe_graphs(self, outputs: Sequence[str]) -> str:
        del outputs
        return (
            "`model` takes `source`, int64 (batch, subwords), and returns keys and values of each sentence. `step` "
            "takes the last words, their position and the states of the positions before, and returns the logits of "
            f"the next words. Subwords are sentencepiece's, in `{VOCABULARY}`."
        )

    def parts(self, *, half: bool) -> Sequence[GraphPart]:
        """Return the encoder and the decoder step."""
        del half
        return translator_parts(self.translator.network)

    def open(self, form: GraphFormat, folder: Path, threads: int) -> Graph:
        graphs = {part: form.open(folder, threads, part) for part in (MODEL, STEP)}
        translator = _GraphTranslator(self.translator, graphs, self._state_size)
        return lambda rows: _translations(translator, rows)

    def run(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the translations, computed as `patchloom translate` does."""
        return _translations(self.translator, rows)

    def calibration(self, count: int) -> np.ndarray:
        del count
        raise UsageError(f"a {self.task} run cannot be quantized")

    def agreement(self, outputs: Outputs, expected: Outputs) -> float:
        return 100 * float((outputs[TEXT] == expected[TEXT]).mean())

    def differences(self, outputs: Outputs, expected: Outputs) -> tuple[float, float]:
        """Return the largest difference of scores, and the relative one.

        The relative one is the share of different sentences if that is larger and more than `MOST_OTHERS`.
        """
        gap = float(np.abs(outputs[SCORE] - expected[SCORE]).max())
        relative = gap / max(1.0, float(np.abs(expected[SCORE]).max()))
        others = 1 - self.agreement(outputs, expected) / 100
        return gap, relative if others <= MOST_OTHERS else max(relative, others)

    def quality(self, outputs: Outputs) -> float | None:
        """Return the BLEU of the compared sentences."""
        return dict(translation_scores(list(outputs[TEXT]), self._references, self.translator.target))["bleu"]


class _GraphTranslator(LineTranslator):
    """The run's translator with graphs instead of the network."""

    def __init__(self, run: Translator, graphs: Mapping[str, Graph], state_size: int) -> None:
        self.vocabulary, self.source, self.target, self.longest = run.vocabulary, run.source, run.target, run.longest
        self.most_tokens, self.beams, self.length_penalty = run.most_tokens, run.beams, run.length_penalty
        self._graphs, self._state_size = graphs, state_size

    def _search(self, pieces: Sequence[list[int]], beams: int, penalty: float, n_best: int) -> list[list[Hypothesis]]:
        return BeamSearch(self._graphs, self.most_tokens, self._state_size, beams, penalty).of_pieces(pieces, n_best)


def _translations(translator: LineTranslator, rows: np.ndarray) -> dict[str, np.ndarray]:
    best = [translations[0] for translations in translator.translate(rows.tolist())]
    texts = np.array([one.text for one in best] or [""], object)[: len(best)]
    return {TEXT: texts, SCORE: np.array([one.score for one in best])}
