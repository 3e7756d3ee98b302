"""`patchloom export`: write a run of any task as an artifact or a single page."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchloom.disk import temporary_folder
from patchloom.exporters.export import (
    ArtifactBuilder,
    Exported,
    artifact_folder,
    check_options,
    check_precision,
    write_artifact_files,
)
from patchloom.exporters.subject import ExportSettings, ExportSubject
from patchloom.runs.folders import new_folder, refuse_taken
from patchloom.runs.locate import run_folder
from patchloom.tasks.table import TASKS, task_of_run
from patchloom_runtime.engines.formats import GraphFormat, PageFormat, format_for, format_named
from patchloom_runtime.errors import UsageError, with_near_options
from patchloom_runtime.printable import printable

if TYPE_CHECKING:
    from patchloom.exporters.single_page.page import Page

CALIBRATION, ALLOWED_LOSS = 128, 1.0


@with_near_options
def export(
    run: str,
    out: str,
    *,
    to: str | None = None,
    data: str | None = None,
    split: str | None = None,
    size: int | None = None,
    half: bool = False,
    int8: bool = False,
    allowed_loss: float | None = None,
    tolerance: float | None = None,
    images: int | None = None,
    calibration: int | None = None,
    packed: bool = False,
) -> "Exported | Page":
    """Write a run as something that answers without patchloom: an artefact, or one HTML page.

    run           folder of a run, or published weights
    out           the artifact's folder, or the page's file; it is there whole or not at all. photos.onnx becomes the
                  folder photos-onnx
    to            onnx, torch, openvino or html; by default onnx, or html where `out` ends in .html
    data          images it is compared with the run on; by default those of the run
    split         train, val, test or all; by default val, or what the run held out
    size          of its images in pixels, where not the run's own
    half          float16 weights and sums; a page has float16 weights always
    int8          calibrated on images of train; kept if it is faster here and loses at most `allowed_loss`. Of a page
                  the weights alone
    allowed_loss  points of accuracy (without labels: of same answers) that int8 may lose; 1
    tolerance     the largest difference from the run that is accepted, as a share of its largest output
    images        most that are compared, spread over the split; 1,000, of a detector 100, of a translator 200 sentences
    calibration   images that int8 is calibrated on; 128
    packed        store the graph compressed, without loss: of a run that `patchloom prune` left, zeros take no room
    """
    given = {"data": data, "split": split, "size": size, "tolerance": tolerance, "images": images}
    given |= {"allowed_loss": allowed_loss, "calibration": calibration, "half": half or None, "packed": packed or None}
    form = format_named(to or format_for(out))
    form.refuse_missing(form.to_write)
    if isinstance(form, PageFormat):
        for name, value in given.items():
            if value is not None:
                raise UsageError(f"--{name.replace('_', '-')} is about artefacts; --to {form.name} does not read it")
        page: Page = form.write_page(run, out, int8=int8)
        return page
    assert isinstance(form, GraphFormat)
    calibration = CALIBRATION if calibration is None else calibration
    allowed_loss = ALLOWED_LOSS if allowed_loss is None else allowed_loss
    check_options(
        form, half=half, int8=int8, images=images, calibration=calibration, allowed_loss=allowed_loss, size=size
    )
    named, out = out, artifact_folder(out)
    refuse_taken(Path(out))
    folder_of_run = run_folder(run)
    kind: Any = subject_type(folder_of_run)
    check_precision(kind, "float16" if half else "int8" if int8 else "float32")
    subject = kind(folder_of_run, ExportSettings(data, split, size, images))
    with temporary_folder() as temporary, new_folder(Path(out)) as folder:
        made = ArtifactBuilder(form, subject, half=half, tolerance=tolerance)
        made.plain(folder)
        if int8:
            made.quantized(folder, temporary, subject.calibration(calibration), allowed_loss)
        sizes = made.pack(folder) if packed else {}
        renamed = [f"an artifact is a folder: it is {out}, not a file {named}"] if out != named else []
        notes = (*renamed, *subject.notes, *made.notes)
        rows, count = tuple(made.rows), len(subject.rows)
        exported = Exported(Path(out), form.name, made.precision, rows, count, subject.measure, notes, subject.compared)
        write_artifact_files(folder, form, subject, made, sizes, exported)
    return exported


def subject_type(folder: Path) -> type[ExportSubject]:
    """Return the export class of a run's task; raise UsageError if the task is not exported."""
    task = task_of_run(folder)
    if task.export is None:
        names = ", ".join(name for name, each in TASKS.items() if each.export)
        raise UsageError(f"{printable(str(folder))} is a run of {task.name}, which cannot be exported; {names} can")
    return task.export
