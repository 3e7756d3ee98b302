"""Multi30k En-De: ResMLP and the Transformer of the same size, vocabulary, data and steps; scores and samples.

    python benchmarks/multi30k.py multi30k/ --out runs/multi30k            # train.en.gz, train.de.gz, val.*, test*.*
    python benchmarks/multi30k.py multi30k/ --out runs/multi30k --table    # of what is there already

Options after `--` go to every `patchloom train`. A run that is there already goes on or is left as it is.
"""

import argparse
import subprocess
import sys
from itertools import islice
from pathlib import Path

import patchloom
from patchloom.data.pairs import open_parallel
from patchloom.deployment.run_record import read_run_record
from patchloom.deployment.text_evaluation import evaluate_text
from patchloom.engine.display import duration

RUNS = {
    "resmlp": ("--model", "translation_resmlp_6"),
    "transformer": ("--model", "translation_transformer_base"),
}
DIRECTION = ("--set", "text.source=en", "--set", "text.target=de")
SAMPLES = 6


def main() -> None:
    """Train what was asked for, then tell."""
    own, _, further = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--split", default="test_2016_flickr")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args(own.split())
    for name in [] if given.table else given.only:
        command = [sys.executable, "-m", "patchloom.cli", "train", given.data, "--recipe", "translation_small"]
        options = [*DIRECTION, *RUNS[name], *further.split()]
        subprocess.run([*command, "--out", str(given.out / name), *options], check=True)
    tell({name: given.out / name for name in RUNS if (given.out / name / "run.json").exists()}, given.data, given.split)


def tell(folders: dict[str, Path], data: str, split: str) -> None:
    """A line a run, then some sentences by all of them."""
    translators = {name: patchloom.load_translator(folder) for name, folder in folders.items()}
    print("| network | parameters | epochs | BLEU | tokenised | lower-cased | chrF | time |")
    print("|---|---|---|---|---|---|---|---|")
    for name, translator in translators.items():
        found = evaluate_text(translator, data, split=split)[split]
        values, record = dict(found), read_run_record(folders[name])
        assert record is not None
        size = sum(p.numel() for p in translator.network.parameters()) / 1e6
        scores = " | ".join(f"{values[key]:.2f}" for key in ("bleu", "bleu_tokenised", "bleu_lowercase", "chrf"))
        print(f"| {name} | {size:.1f} M | {record.epochs} | {scores} | {duration(record.seconds)} |")
        print(f"<!-- {found.scores.signature} -->")
    pairs = list(islice(open_parallel(data, source="en", target="de").tests[split], SAMPLES))
    answers = {name: translator.translate([source for source, _ in pairs]) for name, translator in translators.items()}
    for (source, reference), *found in zip(pairs, *answers.values(), strict=True):
        print(f"\nen           {source}\nreference    {reference}")
        for name, best in zip(answers, found, strict=True):
            print(f"{name:<12} {best[0].text}")


if __name__ == "__main__":
    main()
