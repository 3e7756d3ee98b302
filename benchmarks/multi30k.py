"""Multi30k En-De: ResMLP and the Transformer of the same size, vocabulary, data and steps; scores and samples.

    python benchmarks/multi30k.py multi30k/ --out runs/multi30k            # train.en.gz, train.de.gz, val.*, test*.*
    python benchmarks/multi30k.py multi30k/ --out runs/multi30k --table    # of what is there already
    python benchmarks/multi30k.py multi30k/ --out runs/multi30k --seeds 3 --csv benchmarks/results/papers

The second form of a network's name has its number of layers; without one, they are the recipe's three. Options after
`--` go to every `patchloom train`. A run that is there already goes on or is left as it is. Several seeds are written
as multi30k.csv, with verdicts on the claims of ResMLP table 5 by the rule of docs/papers/index.md.
"""

import argparse
import csv
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from paper_tables import Claim
from papers import judge, read
from trainings import options_of, train
from trainings import read as read_options

import patchloom
from patchloom.data.text.pairs import open_parallel
from patchloom.engine.display import duration
from patchloom.runs.run_metadata import read_run_metadata
from patchloom.tasks.translation.evaluation import evaluate_text

RESMLP = ("--model", "translation_resmlp_6")
RUNS = {
    "resmlp": RESMLP,
    "transformer": ("--model", "translation_transformer_base"),
    "resmlp_6": (*RESMLP, "--set", "model.options.layers=6"),
    "resmlp_12": (*RESMLP, "--set", "model.options.layers=12"),
}
CLAIMS = (
    Claim(
        "A Transformer is a little ahead of ResMLP in English-German translation",
        ("transformer",),
        ("resmlp",),
        "bleu",
    ),
    Claim("A deeper ResMLP translates better", ("resmlp_12",), ("resmlp_6",), "bleu"),
)
DIRECTION = ("--set", "text.source=en", "--set", "text.target=de")
SAMPLES = 6
COLUMNS = ("variant", "seed", "parameters", "epochs", "bleu", "bleu_tokenised", "bleu_lowercase", "chrf", "seconds")


def main() -> None:
    """Train what was asked for, then tell."""
    parser = options_of(__doc__, RUNS)
    parser.add_argument("--split", default="test_2016_flickr")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--csv", type=Path, help="folder to write multi30k.csv to")
    given, further = read_options(parser)
    folders = {
        (name, seed): given.out / (f"{name}_{seed}" if seed else name)
        for seed in range(given.seeds)
        for name in given.only or RUNS
    }
    for (name, seed), folder in {} if given.table else folders.items():
        options = ["--recipe", "translation_small", *DIRECTION, *RUNS[name], "--set", f"seed={seed}"]
        train(given.data, folder, [*options, *further])
    tell({run: folder for run, folder in folders.items() if (folder / "run.json").exists()}, given)


def tell(folders: Mapping[tuple[str, int], Path], given: argparse.Namespace) -> None:
    """A line a run, verdicts on claims where there are several seeds, then some sentences by the first seeds."""
    translators = {run: patchloom.load(folder) for run, folder in folders.items()}
    lines = []
    for run, translator in translators.items():
        found = evaluate_text(translator, str(given.data), split=given.split)[given.split]
        record = read_run_metadata(folders[run])
        assert record is not None
        line = dict(zip(("variant", "seed"), run, strict=True)) | dict(found)
        line |= {"parameters": sum(p.numel() for p in translator.network.parameters())}
        lines.append(line | {"epochs": record.epochs, "seconds": round(record.seconds)})
    print("| network | seed | parameters | epochs | BLEU | tokenised | lower-cased | chrF | time |")
    print("|---|---|---|---|---|---|---|---|---|")
    for line in lines:
        scores = " | ".join(f"{line[key]:.2f}" for key in ("bleu", "bleu_tokenised", "bleu_lowercase", "chrf"))
        size = f"{line['parameters'] / 1e6:.1f} M"
        print(f"| {line['variant']} | {line['seed']} | {size} | {line['epochs']} | {scores} | "
              f"{duration(line['seconds'])} |")  # fmt: skip
    if lines:
        print(f"<!-- {found.scores.signature} -->")
    if given.csv:
        path = given.csv / "multi30k.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
        for claim in CLAIMS:
            verdict, differences = judge(read(path), claim)
            texts = "; ".join(f"{d.mean:+.2f} ({d.low:+.2f} … {d.high:+.2f}), {d.seeds} seeds" for d in differences)
            print(f"{claim.text}: {verdict}. {texts}")
    pairs = list(islice(open_parallel(str(given.data), source="en", target="de").tests[given.split], SAMPLES))
    firsts = {name: translator for (name, seed), translator in translators.items() if seed == 0}
    answers = {name: each.translate([source for source, _ in pairs]) for name, each in firsts.items()}
    for (source, reference), *found_texts in zip(pairs, *answers.values(), strict=True):
        print(f"\nen           {source}\nreference    {reference}")
        for name, best in zip(answers, found_texts, strict=True):
            print(f"{name:<12} {best[0].text}")


if __name__ == "__main__":
    main()
