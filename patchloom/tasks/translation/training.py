"""Training of translators: parallel text, subwords, a network from sequence to sequence, BLEU."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from patchloom.data.reading_options import Reading
from patchloom.data.text.encoded import EncodedPairs, encode_pairs, learn_vocabulary
from patchloom.data.text.pairs import Pairs, open_parallel
from patchloom.data.text.token_batches import TokenLoader
from patchloom.engine.distribution import Processes, unwrap
from patchloom.engine.epoch_average import EpochAverage
from patchloom.evaluation.translation import token_loss, translation_scores
from patchloom.models.from_config import load_weights
from patchloom.models.seq2seq import Seq2Seq
from patchloom.objectives.objective import Ingredients, Objective, make_objective
from patchloom.recipes.choices import base_recipe, changed_recipe
from patchloom.recipes.schema import override
from patchloom.runs.config import is_run, read_config
from patchloom.runs.provenance import Provenance, write_left_out, write_provenance
from patchloom.tasks.plan import (
    RULE_OPTIONS,
    TrainingSettings,
    check_numbers,
    named_start,
    placed,
    refuse_unread,
    same_run,
)
from patchloom.tasks.provenance import place_of, refuse_other_data, refuse_other_start, starting_record
from patchloom.tasks.task import Judge, Training
from patchloom.tasks.translation.evaluation import TextEvaluation, evaluate_pairs
from patchloom.tasks.translation.model import Translator
from patchloom.tasks.translation.plan import Corpus, TextPlan, make_seq2seq
from patchloom.tasks.translation.run_files import (
    VOCABULARY,
    load_seq2seq,
    read_translation_files,
    read_vocabulary,
    write_translation_files,
    write_val,
)
from patchloom_runtime.errors import CheckpointError, DataError, UsageError
from patchloom_runtime.text.vocabulary import Vocabulary

GREEDY_SENTENCES = 200  # of val, translated at every evaluation: about a second
# Settings that are about images.
_IMAGE_OPTIONS = (
    *("teacher", "size", "pictures", "preview", "workers", "worker_timeout", "shard", "level", "fit"),
    *(option.name for option in fields(Reading)),
    *RULE_OPTIONS,
)


class TranslationTraining(Training[TextPlan]):
    """Training on pairs of sentences; batches have about the same number of tokens."""

    batch_unit = "tokens"
    speed_unit = "pairs"
    captured_method = ""
    compiles_by_default = False
    compile_options: ClassVar = {"dynamic": True}  # every length is another shape: one graph is compiled for all

    def plan(self, settings: TrainingSettings, device: str) -> TextPlan:
        """Plan a run; the whole text is read once."""
        del device
        check_numbers(settings)
        settings = replace(settings, init=named_start(settings.init))
        refuse_unread(settings, _IMAGE_OPTIONS, self.task.refusal)
        if settings.time:
            raise UsageError(
                "--time plans the training of images; where text is translated pass --epochs, or stop with --stop-after"
            )
        if settings.init and not is_run(settings.init):
            raise UsageError(f"--init {settings.init}: no such run")
        base = base_recipe(settings.recipe, settings.model)
        assert base is not None
        recipe, choices = changed_recipe(base, settings.recipe_changes())
        with torch.device("meta"):
            make_seq2seq(recipe, recipe.text.vocabulary)  # a wrong name or option is an error before the text is read
        text = open_parallel(settings.data_text, source=recipe.text.source, target=recipe.text.target, seed=recipe.seed)
        recipe = override(recipe, {"text.source": text.source, "text.target": text.target})
        place = place_of(settings.data)

        def in_folder(folder: Path, why: str) -> tuple[Path, str]:
            same_run(folder, recipe)
            return folder, why

        # `prepare` compares the sentences, after they are encoded with the vocabulary of the folder.
        folder, why = placed(settings, lambda before: before.place in (None, place), in_folder)
        return TextPlan(
            task=self.task,
            settings=settings,
            recipe=recipe,
            choices=choices,
            folder=folder,
            why_folder=why,
            notes=tuple(text.notes),
            text=text,
        )

    def prepare(self, plan: TextPlan, processes: Processes) -> TextPlan:
        """Encode the text with the vocabulary of the run; every process reads the text."""
        text, part, settings = plan.text, plan.recipe.text, plan.settings
        vocabulary = processes.on_main(
            lambda: vocabulary_of_run(plan.folder, settings.init, text.train, part.vocabulary)
        )
        train = encode_pairs(text.train, vocabulary, max_length=part.max_length, max_ratio=part.max_ratio)
        val = encode_pairs(text.val, vocabulary, max_length=part.max_length, max_ratio=None)
        lost = (*text.left_out, *train.left_out)
        if settings.strict and lost:
            raise DataError(f"{lost[0].where}: {lost[0].reason}, and {len(lost) - 1:,} more pairs do not fit")
        record = Provenance((text.source, text.target), len(train), len(val), _digest(train, val), "")
        record = starting_record(record, settings.data, settings.init)
        refuse_other_data(plan.folder, record)
        refuse_other_start(plan.folder, record)
        return replace(
            plan,
            corpus=Corpus(vocabulary, train, val),
            record=record,
            lost=lost,
            left_out=[(each.where, each.reason) for each in lost],
        )

    def network(self, plan: TextPlan) -> Seq2Seq:
        network = make_seq2seq(plan.recipe, len(plan.encoded.vocabulary))
        if plan.settings.init:
            _initialize(network, Path(plan.settings.init), plan.encoded.vocabulary)
        return network

    def loader(self, plan: TextPlan, processes: Processes, stores: Any) -> tuple[TokenLoader, str]:
        del stores
        loader = TokenLoader(
            plan.encoded.train,
            tokens=plan.recipe.optim.batch_size,
            seed=plan.recipe.seed,
            rank=processes.rank,
            world=processes.world,
            pin=processes.device.type == "cuda",
        )
        return loader, ""

    def objective(self, plan: TextPlan, network: Seq2Seq, loader: Any, processes: Processes) -> Objective:
        del loader, processes
        return make_objective(Ingredients(recipe=plan.recipe, network=network))

    def judge(self, plan: TextPlan, processes: Processes) -> "TranslationJudge":
        del processes
        return TranslationJudge(plan)

    def average(self, plan: TextPlan, network: Seq2Seq, loader: Any) -> EpochAverage | None:
        """Return the mean of the weights after the last epochs."""
        averaged = plan.recipe.text.averaged_epochs
        return EpochAverage(network, averaged, loader.steps_per_epoch) if averaged > 1 else None

    def write_files(self, plan: TextPlan, network: Seq2Seq) -> None:
        """Write config, recipe, vocabulary, the record of the data and the list of unused pairs."""
        write_translation_files(
            plan.folder,
            network,
            plan.recipe,
            plan.encoded.vocabulary,
            task=self.task.name,
            languages=(plan.text.source, plan.text.target),
            longest=plan.encoded.train.longest,
        )
        assert plan.record is not None
        write_provenance(plan.folder, plan.record)
        write_left_out(plan.folder, plan.left_out)

    def evaluate_best(self, plan: TextPlan, run: Any, network: Seq2Seq, reports: Sequence[Any]) -> TextEvaluation:
        """Translate val with the best weights and the recipe's search."""
        del reports
        translator = Translator.of(network.to(run.processes.device), read_translation_files(plan.folder))
        with run.processes.autocast():
            return evaluate_pairs(translator, plan.text.val)

    def write_val(self, plan: TextPlan, report: TextEvaluation) -> None:
        """Write `val.json`: metrics and some translations."""
        write_val(plan.folder, report)


def _digest(*parts: EncodedPairs) -> str:
    digest = hashlib.sha256()
    for pairs in parts:
        for side in (pairs.source, pairs.target):
            digest.update(side.subwords.data)
            digest.update(side.starts.data)
    return digest.hexdigest()


def _initialize(network: Seq2Seq, init: Path, vocabulary: Vocabulary) -> None:
    """Load the weights of --init, which must have the same vocabulary."""
    source, files = load_seq2seq(init)
    if files.vocabulary != vocabulary:
        raise UsageError(f"{init} has another vocabulary than the run to resume; pass a new folder with --out")
    load_weights(network, dict(source.state_dict()), f"--init {init}")


def vocabulary_of_run(folder: Path, init: str | None, train: Pairs, size: int) -> Vocabulary:
    """Read the vocabulary in the run folder or that of --init, else learn one."""
    checksum = read_config(folder).get("vocabulary") if (folder / "config.json").is_file() else None
    if (folder / VOCABULARY).is_file():
        return read_vocabulary(folder, checksum)
    if init:
        return read_translation_files(Path(init)).vocabulary
    learned = learn_vocabulary(train, size)
    if checksum and hashlib.sha256(learned.to_bytes()).hexdigest() != checksum:
        raise CheckpointError(
            f"{folder / VOCABULARY} is lost, and the text has changed since it was learned. Restore the file, "
            "or pass a new folder with --out."
        )
    return learned


class TranslationJudge(Judge):
    """Loss and perplexity of val, and BLEU and exact matches of some greedy translations. Every rank computes all."""

    metric = "loss"
    lower_is_better = True

    def __init__(self, plan: TextPlan) -> None:
        text, recipe, corpus = plan.text, plan.recipe, plan.encoded
        tokens = max(recipe.optim.batch_size, recipe.text.max_length)  # val may have the longest sentence
        self._batches = TokenLoader(corpus.val, tokens=tokens, shuffle=False)
        self._sources, self._references = map(list, zip(*islice(text.val, GREEDY_SENTENCES), strict=True))
        self._corpus, self._languages = corpus, (text.source, text.target)

    def report(self, model: nn.Module) -> Iterable[tuple[str, float]]:
        network: Any = unwrap(model)
        yield from ((name, value) for name, value in token_loss(network, self._batches.epoch(0)) if name != "tokens")
        longest = self._corpus.train.longest[0]
        translator = Translator(network, self._corpus.vocabulary, languages=self._languages, longest=longest)
        translations = [best.text for best, *_ in translator.translate(self._sources, beams=1)]
        scores = translation_scores(translations, self._references, self._languages[1])
        yield "bleu_greedy", scores.bleu
        yield "exact_greedy", scores.exact
