"""`patchloom audit DATA`: likely wrong labels, conflicts, leaks and outliers, and a page to correct them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from patchloom.cli.options import Device, Json, OmitFields, keywords
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.options import HARDWARE, MODEL, Argument, Option

if TYPE_CHECKING:
    from patchloom.training.auditing.audit_report import AuditReport

LISTED = 10  # rows per table in the terminal; the page, --json and --verbose have all


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    data: Annotated[
        tuple[str, ...],
        Argument("Folder of class folders, or other classification data that `train` reads.", metavar="DATA"),
    ]
    folds: Annotated[int, Option("Number of runs; each predicts the images it was not trained on.", metavar="K")] = 5
    folds_run: Annotated[
        str | None, Option("Use the finished runs of `train --folds` in this folder.", metavar="DIR")
    ] = None
    unlabeled: Annotated[
        str | None,
        Option("Folder of unlabeled images; --most of them are proposed for labeling.", metavar="FOLDER"),
    ] = None
    most: Annotated[int, Option("Number of unlabeled images to choose.", metavar="N")] = 20
    page: Annotated[str | None, Option("HTML page. Default: audit.html in the folder of the runs.")] = None
    model: Annotated[str | None, Option("Network. Default: chosen for the data.", complete="model")] = None
    recipe: Annotated[str, Option("Published recipe, a recipe.yaml, or auto.", complete="recipe", panel=MODEL)] = "auto"
    init: Annotated[
        str | None, Option("Start from a run, published weights or a file; none: random.", complete="run")
    ] = "auto"
    epochs: Annotated[int | None, Option("Passes over the data per run.")] = None
    time: Annotated[str | None, Option("Fit all runs into 30m, 2h …")] = None
    size: Annotated[int | None, Option("Image size in pixels.", panel=MODEL)] = None
    batch: Annotated[int | None, Option("Images per update.", panel=MODEL)] = None
    changes: Annotated[
        dict[str, Any],
        Option("Recipe fields to change: augment.mixup=0. Repeatable.", name="set", metavar="FIELD=VALUE", panel=MODEL),
    ] = field(default_factory=dict)
    out: Annotated[str | None, Option("Folder of the runs. Default: runs/NAME-folds-K.")] = None
    device: Device = "auto"
    workers: Annotated[int | None, Option("Processes that read images.", panel=HARDWARE)] = None
    reading: Annotated[Reading, OmitFields(("val",))] = AS_IT_IS
    as_json: Json = False


def audit(options: AuditOptions) -> None:
    """Train several runs to find likely wrong labels, copies and outliers, and write a page to correct them.

    patchloom audit photos/

    patchloom audit photos/ --folds-run runs/photos-folds-5 --unlabeled new/ --most 50

    patchloom train photos/ --corrections corrections.csv
    """
    from patchloom.cli.output import print_json, refuse_inside
    from patchloom.data.sources.corrections import read_corrections
    from patchloom.training.auditing.audit import audit as run_audit
    from patchloom.training.auditing.page import write_audit_page

    if options.page:
        refuse_inside(Path(options.page), *options.data)
    report = run_audit(options.data, **keywords(options, "data", "page"))
    corrections = options.reading.corrections
    earlier = list(read_corrections(Path(corrections).expanduser()).values()) if corrections else []
    page = Path(options.page) if options.page else report.folds_run / "audit.html"
    write_audit_page(page, report, earlier=earlier)
    if options.as_json:
        print_json(report.to_dict() | {"page": str(page)})
    else:
        _print(report, page)


def _print(report: "AuditReport", page: Path) -> None:
    from patchloom.cli.output import print_result, shortened
    from patchloom.cli.table import print_table
    from patchloom.training.auditing.page import gain_commands
    from patchloom_runtime.printable import plural, printable

    def more(count: int, most: int) -> None:
        if count > most:
            print_result(f"and {count - most:,} more on the page")

    images, most = len(report.predictions), shortened(LISTED) or max(1, len(report.predictions))
    wrong = report.wrong_labels
    if wrong:
        rows = [[one.image.key, one.image.label, one.suggestion, f"{one.probability:.0%}"] for one in wrong[:most]]
        print_table(["image", "label", "suggestion", "#prob."], rows, title="Likely wrong labels, most certain first")
        more(len(wrong), most)
    for title, groups in (
        ("Copies with different labels", report.conflicts),
        ("Copies in different splits", report.leaks),
    ):
        if groups:
            rows = [[" = ".join(f"{one.key} ({one.label}, {one.place.split})" for one in group)] for group in groups]
            print_table([title], rows[:most])
            more(len(groups), most)
    if report.outliers:
        rows = [[one.image.key, one.image.label, f"{one.distance:.1f}"] for one in report.outliers[:most]]
        print_table(["image", "label", "#distance"], rows, title="Outliers: distance to the nearest images, median 1")
        more(len(report.outliers), most)
    if report.unlabeled:
        rows = [[one.path, one.prediction, f"{one.probability:.0%}"] for one in report.unlabeled[:most]]
        print_table(["image", "prediction", "#prob."], rows, title="Most worth labeling, best first")
        more(len(report.unlabeled), most)
    for note in report.notes:
        print_result(printable(f"note: {note}"))
    share = f"{100 * report.estimated_wrong / images:.1f} %"
    print_result(
        f"labels     {len(wrong):,} of {images:,} likely wrong; estimate of all: {report.estimated_wrong:.0f} ({share})"
    )
    print_result(
        f"gain       top-1 out of fold {report.top1:.2f} → {report.predicted_top1:.2f} % with the suggested labels, "
        "predicted without retraining"
    )
    others = [(report.conflicts, "conflict"), (report.leaks, "leak"), (report.outliers, "outlier")]
    print_result(f"also       {', '.join(plural(len(listed), noun) for listed, noun in others)}")
    print_result(f"{page}")
    print("Next: open the page, save corrections.csv, and measure the gain:")
    for command in gain_commands(report):
        print(f"  {printable(command)}")
