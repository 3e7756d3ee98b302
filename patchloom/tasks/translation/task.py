"""To translate sentences.

A run's folder has `vocabulary.model` beside what every run has. The vocabulary is learned once, from the sentences to
train on, and then belongs to the run: it is never learned again.
"""

import hashlib
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from patchloom.data.text.encoded import EncodedPairs, encode_pairs, learn_vocabulary
from patchloom.data.text.pairs import LeftOut, Pairs, ParallelText, open_parallel
from patchloom.data.text.token_batches import TokenLoader
from patchloom.engine.distribution import Processes, unwrap
from patchloom.engine.epoch_average import EpochAverage
from patchloom.evaluation.translation import token_loss, translation_scores
from patchloom.models.cost import human
from patchloom.models.from_config import load_weights
from patchloom.models.seq2seq import Seq2Seq, create_seq2seq
from patchloom.objectives.objective import Ingredients, Objective, make_objective
from patchloom.recipes.choices import base_recipe, changed_recipe
from patchloom.recipes.schema import Recipe, override
from patchloom.runs.config import is_run, read_config
from patchloom.runs.provenance import LEFT_OUT, Provenance, write_left_out, write_provenance
from patchloom.tasks.plan import Plan, TrainingSettings, check_numbers, placed, refuse_unread, same_run
from patchloom.tasks.provenance import changes_since, place_of, refuse_other_data, refuse_other_start, starting_record
from patchloom.tasks.task import Judge, Scores, Task, TaskPage
from patchloom.tasks.translation.evaluation import TextEvaluation, evaluate_pairs, evaluate_text
from patchloom.tasks.translation.report import text_scores, translation_page
from patchloom.tasks.translation.run_files import (
    VAL,
    VOCABULARY,
    keep_val,
    load_seq2seq,
    read_translation_files,
    read_val,
    read_vocabulary,
    write_translation_files,
)
from patchloom.tasks.translation.translator import Translator, load_translator
from patchloom_runtime.errors import CheckpointError, DataError, PatchloomError, UsageError
from patchloom_runtime.text.vocabulary import Vocabulary

# Sentences of val that are translated, greedily, at every evaluation; a second or so.
GREEDY_SENTENCES = 200
# Settings that are about images.
_OF_IMAGES = (
    *("teacher", "size", "pictures", "workers", "worker_timeout", "shard", "level", "labels", "taxonomy", "fit"),
    *("without", "val"),
)


@dataclass(frozen=True, eq=False)
class Corpus:
    """The text as numbers."""

    vocabulary: Vocabulary
    train: EncodedPairs
    val: EncodedPairs


@dataclass(frozen=True, kw_only=True)
class TextPlan(Plan):
    """A text, and once the processes know each other the same as numbers."""

    text: ParallelText
    corpus: Corpus | None = None
    lost: tuple[LeftOut, ...] = ()  # pairs that are not trained on

    @property
    def known(self) -> Corpus:
        """The text as numbers."""
        assert self.corpus is not None
        return self.corpus


class Translation(Task[TextPlan]):
    """Parallel text, subwords, a network from sequence to sequence, BLEU."""

    name = "translation"
    kind = "translator"
    counts = "tokens"
    unit = "pairs"
    compiles_by_default = False
    compile_options: ClassVar = {"dynamic": True}  # every length is a shape of its own, so it is compiled once for all
    not_read = "is about images; leave it out where text is translated"

    # Before ---------------------------------------------------------------------------------------------------------

    def plan(self, settings: TrainingSettings, device: str) -> TextPlan:
        """What can be wrong with the options, the recipe and the text is found here; the whole text is read once."""
        del device
        check_numbers(settings)
        refuse_unread(settings, _OF_IMAGES, self.not_read)
        if settings.time:
            raise UsageError(
                "--time plans the training of images; where text is translated give --epochs, or stop with --stop-after"
            )
        if settings.init and not is_run(settings.init):
            raise UsageError(f"--init {settings.init}: no such run")
        base = base_recipe(settings.recipe, settings.model)
        assert base is not None
        recipe, choices = changed_recipe(base, settings.recipe_changes())
        with torch.device("meta"):
            make_seq2seq(recipe, recipe.text.vocabulary)  # a wrong name or option is said before the text is read
        text = open_parallel(settings.data, source=recipe.text.source, target=recipe.text.target, seed=recipe.seed)
        recipe = override(recipe, {"text.source": text.source, "text.target": text.target})
        # The sentences are compared once they are numbers of the folder's vocabulary.
        place = place_of(settings.data)

        def in_folder(folder: Path, why: str) -> tuple[Path, str]:
            same_run(folder, recipe)
            return folder, why

        folder, why = placed(settings, lambda before: before.place in (None, place), in_folder)
        return TextPlan(
            task=self,
            settings=settings,
            recipe=recipe,
            choices=choices,
            folder=folder,
            why_folder=why,
            notes=tuple(text.notes),
            text=text,
        )

    def prepare(self, plan: TextPlan, processes: Processes) -> TextPlan:
        """The run's vocabulary, and train and val in it; every process reads the text."""
        text, recipe = plan.text, plan.recipe
        vocabulary = _from_main(processes, lambda: _vocabulary(plan))
        longest = recipe.text.max_length
        train = encode_pairs(text.train, vocabulary, max_length=longest, max_ratio=recipe.text.max_ratio)
        val = encode_pairs(text.val, vocabulary, max_length=longest, max_ratio=None)
        lost = (*text.left_out, *train.left_out)
        if plan.settings.strict and lost:
            raise DataError(f"{lost[0].where}: {lost[0].reason}, and {len(lost) - 1:,} more pairs do not fit")
        found = Provenance((text.source, text.target), len(train), len(val), _digest(train, val), "")
        record = starting_record(found, plan.settings.data, plan.settings.init)
        refuse_other_data(plan.folder, record)
        refuse_other_start(plan.folder, record)
        return replace(
            plan,
            corpus=Corpus(vocabulary, train, val),
            record=record,
            lost=lost,
            left_out=[(each.where, each.reason) for each in lost],
        )

    def data_lines(self, plan: TextPlan, *, dry_run: bool) -> list[str]:
        """The text, what is left out of it, and the network."""
        t, corpus = plan.text, plan.known
        assert plan.record is not None
        tests = f"; tests: {', '.join(t.tests)}" if t.tests else ""
        lines = [
            f"data       {t.name}, {t.source} → {t.target}: {len(t.train):,} pairs to train on, "
            f"{len(t.val):,} to validate{tests}",
            *(f"           note: {note}" for note in plan.notes),
        ]
        if plan.lost:
            first, listed = plan.lost[0], "" if dry_run else f"; all in {plan.folder / LEFT_OUT}"
            lines.append(f"left out   {len(plan.lost):,} pairs of train, first {first.where}: {first.reason}{listed}")
        if corpus.val.left_out:
            first = corpus.val.left_out[0]
            told = f"{len(corpus.val.left_out):,} pairs of val have no loss"
            lines.append(f"           note: {told}, first {first.where}: {first.reason}")
        lines += [f"           note: {note}" for note in changes_since(plan.folder, plan.record)]
        with torch.device("meta"):
            count = sum(p.numel() for p in make_seq2seq(plan.recipe, len(corpus.vocabulary)).parameters())
        note = f" ({corpus.vocabulary.note})" if corpus.vocabulary.note else ""
        subwords = f"{len(corpus.vocabulary):,} subwords{note}"
        return [*lines, f"model      {plan.recipe.model.name}: {human(count)} parameters, {subwords}"]

    def data_facts(self, plan: TextPlan) -> dict[str, Any]:
        """The text of a plan for machines."""
        return {
            "name": plan.text.name,
            "languages": [plan.text.source, plan.text.target],
            "train": len(plan.known.train),
            "val": len(plan.known.val),
            "notes": list(plan.notes),
        }

    def examples(self, plan: TextPlan) -> Pairs:
        """The training pairs."""
        return plan.text.train

    # The objects of a run -------------------------------------------------------------------------------------------

    def network(self, plan: TextPlan) -> Seq2Seq:
        """With random weights, or those of --init."""
        network = make_seq2seq(plan.recipe, len(plan.known.vocabulary))
        if plan.settings.init:
            _initialize(network, Path(plan.settings.init), plan.known.vocabulary)
        return network

    def loader(self, plan: TextPlan, processes: Processes, stores: Any) -> tuple[TokenLoader, str]:
        """Batches of about as many tokens."""
        del stores
        loader = TokenLoader(
            plan.known.train,
            tokens=plan.recipe.optim.batch_size,
            seed=plan.recipe.seed,
            rank=processes.rank,
            world=processes.world,
            pin=processes.device.type == "cuda",
        )
        return loader, ""

    def objective(
        self, plan: TextPlan, network: Seq2Seq, loader: Any, processes: Processes, compiles: bool
    ) -> Objective:
        """The smoothed loss of every token."""
        del loader, processes, compiles
        return make_objective(Ingredients(recipe=plan.recipe, network=network))

    def judge(self, plan: TextPlan, processes: Processes) -> "TranslationJudge":
        """Loss, and some translations."""
        del processes
        return TranslationJudge(plan)

    def average(self, plan: TextPlan, network: Seq2Seq, loader: Any) -> EpochAverage | None:
        """The mean of the weights after the last epochs."""
        averaged = plan.recipe.text.averaged_epochs
        return EpochAverage(network, averaged, loader.steps_per_epoch) if averaged > 1 else None

    # After ----------------------------------------------------------------------------------------------------------

    def write_files(self, plan: TextPlan, network: Seq2Seq) -> None:
        """Config, recipe, vocabulary, what it began with and what was left out."""
        write_translation_files(
            plan.folder,
            network,
            plan.recipe,
            plan.known.vocabulary,
            task=self.name,
            languages=(plan.text.source, plan.text.target),
            longest=plan.known.train.longest,
        )
        assert plan.record is not None
        write_provenance(plan.folder, plan.record)
        write_left_out(plan.folder, plan.left_out)

    def final(self, plan: TextPlan, run: Any, network: Seq2Seq) -> TextEvaluation:
        """Val by the best weights, with the recipe's search."""
        files = read_translation_files(plan.folder)
        translator = Translator.of(network.to(run.processes.device), files)
        with run.processes.autocast():
            return evaluate_pairs(translator, plan.text.val)

    def keep(self, plan: TextPlan, judged: TextEvaluation) -> None:
        """`val.json`: the numbers and some translations."""
        keep_val(plan.folder, judged)

    def in_words(self, run: Any, metrics: Mapping[str, float]) -> str:
        """BLEU and the rest."""
        del run
        return f"BLEU {metrics['bleu']:.2f}, chrF {metrics['chrf']:.2f}, {metrics['exact']:.1f} % exact"

    def more_words(self, plan: TextPlan, judged: TextEvaluation) -> Iterator[str]:
        """How BLEU was computed."""
        del plan
        yield f"           {judged.scores.signature}"

    def data_name(self, plan: TextPlan) -> str:
        """The text and its languages."""
        return f"{plan.text.name}, {plan.text.source} → {plan.text.target}"

    def next_commands(self, plan: TextPlan) -> Sequence[str]:
        """Use it, or judge it."""
        run, text = shlex.quote(str(plan.folder)), shlex.quote(plan.settings.data)
        return f"patchloom translate {run} < source.txt", f"patchloom evaluate {run} --text {text}"

    def page(self, folder: Path, asked: Any) -> TaskPage:
        """Numbers, translations, and where the network looks."""
        return translation_page(folder, asked.network)

    def evaluate(
        self, runs: Mapping[str, Path], data: str | None, *, split: str | None, device: str, **options: Any
    ) -> Scores:
        """One row per run and split."""
        del options
        if data is None:
            first = next(iter(runs.values()))
            raise UsageError(f"{first} translates; say what: patchloom evaluate {first} --text TEXT")
        found = {
            name: evaluate_text(load_translator(folder, device=device), data, split=split)
            for name, folder in runs.items()
        }
        return text_scores(found)

    # A run's folder -------------------------------------------------------------------------------------------------

    def load_network(self, folder: Path) -> Seq2Seq:
        """The trained network, in eval mode."""
        return load_seq2seq(folder)[0]

    def readers(self, folder: Path) -> dict[str, Callable[[], object]]:
        """Its vocabulary, and what it translated of val."""
        return {VOCABULARY: lambda: read_translation_files(folder), VAL: lambda: read_val(folder)}

    def predictor(self, folder: Path, *, device: str = "auto") -> Any:
        """It knows no images."""
        del device
        raise UsageError(
            f"{folder} translates and knows no images; use it with `patchloom translate` or `evaluate --text`"
        )

    def load(self, folder: Path, *, device: str = "auto") -> Translator:
        """The translator of a run."""
        return load_translator(folder, device=device)


class TranslationJudge(Judge):
    """Loss and perplexity of val, BLEU and exact matches of some greedy translations; every rank does all of it."""

    metric = "loss"
    lower_is_better = True

    def __init__(self, plan: TextPlan) -> None:
        text, recipe, corpus = plan.text, plan.recipe, plan.known
        tokens = max(recipe.optim.batch_size, recipe.text.max_length)  # val may have the longest sentence
        self._batches = TokenLoader(corpus.val, tokens=tokens, shuffle=False)
        self._sources, self._references = map(list, zip(*islice(text.val, GREEDY_SENTENCES), strict=True))
        self._corpus, self._languages = corpus, (text.source, text.target)

    def report(self, model: nn.Module) -> Iterable[tuple[str, float]]:
        """(name, value) pairs."""
        network: Any = unwrap(model)
        yield from ((name, value) for name, value in token_loss(network, self._batches.epoch(0)) if name != "tokens")
        longest = self._corpus.train.longest[0]
        translator = Translator(network, self._corpus.vocabulary, languages=self._languages, longest=longest)
        found = [best.text for best, *_ in translator.translate(self._sources, beams=1)]
        scores = translation_scores(found, self._references, self._languages[1])
        yield "bleu_greedy", scores.bleu
        yield "exact_greedy", scores.exact


def make_seq2seq(recipe: Recipe, vocabulary: int) -> Seq2Seq:
    """The recipe's translation network for so many subwords, with random weights."""
    part = recipe.model
    given: dict[str, Any] = {"vocabulary": vocabulary, "max_length": recipe.text.max_length, "dropout": part.dropout}
    if doubled := [name for name in given if name in part.options]:
        group = "model" if doubled[0] == "dropout" else "text"
        raise UsageError(f"model.options.{doubled[0]} is set by {group}.{doubled[0]}. Set that instead.")
    return create_seq2seq(part.name, **given | dict(part.options))


# The vocabulary -------------------------------------------------------------------------------------------------------


def _vocabulary(plan: TextPlan) -> Vocabulary:
    """The one in the run's folder; that of --init; else one that is learned."""
    folder, init = plan.folder, plan.settings.init
    known = read_config(folder).get("vocabulary") if (folder / "config.json").is_file() else None
    if (folder / VOCABULARY).is_file():
        return read_vocabulary(folder, known)
    if init:
        return read_translation_files(Path(init)).vocabulary
    learned = learn_vocabulary(plan.text.train, plan.recipe.text.vocabulary)
    if known and hashlib.sha256(learned.to_bytes()).hexdigest() != known:
        raise CheckpointError(
            f"{folder / VOCABULARY} is lost, and the text has changed since it was learned. Restore the file, "
            "or give a new folder with --out."
        )
    return learned


def _from_main(processes: Processes, make: Callable[[], Vocabulary]) -> Vocabulary:
    """Made by rank 0 alone; where it fails, all ranks fail alike."""
    made: Vocabulary | PatchloomError | None = None
    if processes.is_main:
        try:
            made = make()
        except PatchloomError as error:
            made = error
    made = processes.from_main(made)
    if isinstance(made, PatchloomError):
        raise made
    assert made is not None
    return made


def _digest(*parts: EncodedPairs) -> str:
    digest = hashlib.sha256()
    for pairs in parts:
        for side in (pairs.source, pairs.target):
            digest.update(side.subwords.data)
            digest.update(side.starts.data)
    return digest.hexdigest()


def _initialize(network: Seq2Seq, init: Path, vocabulary: Vocabulary) -> None:
    """Start from a run's weights, which belong to its vocabulary."""
    source, files = load_seq2seq(init)
    if files.vocabulary != vocabulary:
        raise UsageError(f"{init} has another vocabulary than the run to resume; give a new folder with --out")
    load_weights(network, dict(source.state_dict()), f"--init {init}")
