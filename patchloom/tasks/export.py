"""`patchloom export`: write a run of any task as an artifact or a single page."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchloom.data.buckets.mirror import Mirror
from patchloom.data.sources.specs import Data, as_spec, is_url
from patchloom.disk import temporary_folder
from patchloom.exporters.artifact import ArtifactBuilder, Exported, artifact_folder, check_options, check_precision
from patchloom.exporters.formats import GraphFormat, PageFormat, format_for, format_named
from patchloom.exporters.subject import ExportSettings, ExportSubject
from patchloom.runs.folders import new_folder, refuse_taken
from patchloom.runs.locate import run_folder
from patchloom.tasks.table import TASKS, task_of_run
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
    data: Data | None = None,
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
    """Write a run in a form that runs without patchloom: an artifact folder, or one HTML page.

    run           Run folder of any task, or published weights.
    out           Artifact folder, such as photos-onnx; or a page, such as page.html. It is written completely or not at
                  all. photos.onnx becomes the folder photos-onnx.
    to            'onnx' (default), 'torch' or 'openvino'; or 'html', a self-contained page. The default is html
                  if `out` ends in .html.
    data          Images to compare on. Default: those of the run.
    split         'train', 'val', 'test' or 'all'. Default: val, or the images the run held out.
    size          Image size in pixels. Default: the run's.
    half          Use float16 weights and arithmetic. A page always has float16 weights.
    int8          Quantize to int8 with calibration images, if that is faster here and loses little. For a page: int8
                  weights.
    allowed_loss  Points of accuracy that int8 may lose. Default: 1. Without labels, points of equal predictions.
    tolerance     Largest difference from the run, as a share of its largest output. Default: 1e-4, with `half` 3e-2.
    images        Largest number of images to compare. Default: 1,000; detectors: 100; translators: 200 sentences. They
                  are spread over the split.
    calibration   Number of training images that `int8` is calibrated on. Default: 128.
    packed        Compress the weights without loss: zeros left by `prune` take no space.
    """
    form = format_named(to or format_for(out))
    form.check_installed()
    if isinstance(form, PageFormat):
        if is_url(out):
            raise UsageError(f"{printable(out)}: a page is one local file; pass a path")
        _refuse_for_pages(
            form, data=data, split=split, size=size, tolerance=tolerance, images=images, allowed_loss=allowed_loss,
            calibration=calibration, half=half or None, packed=packed or None,
        )  # fmt: skip
        source = run_folder(run)
        return form.write_page(task_of_run(source).model.load(source, device="cpu"), out, int8=int8)
    assert isinstance(form, GraphFormat)
    calibration = CALIBRATION if calibration is None else calibration
    allowed_loss = ALLOWED_LOSS if allowed_loss is None else allowed_loss
    check_options(
        form, half=half, int8=int8, images=images, calibration=calibration, allowed_loss=allowed_loss, size=size
    )
    name = artifact_folder(out)
    bucket = Mirror(name) if is_url(name) else None
    if bucket and bucket.names():
        raise UsageError(f"{printable(name)} exists already; choose another folder or remove it")
    notes = [f"an artifact is a folder: it is {name}, not a file {out}"] if name != out else []
    target = bucket.folder if bucket else Path(name)
    if bucket:  # a copy of what is no longer there
        shutil.rmtree(target, ignore_errors=True)
    refuse_taken(target)
    source = run_folder(run)
    kind: Any = subject_type(source)
    check_precision(kind, "float16" if half else "int8" if int8 else "float32")
    subject = kind(source, ExportSettings(None if data is None else as_spec(data), split, size, images))
    with temporary_folder() as temporary, new_folder(target) as folder:
        builder = ArtifactBuilder(form, subject, half=half, tolerance=tolerance)
        builder.write_graph(folder)
        if int8:
            builder.quantize(folder, temporary, subject.calibration(calibration), allowed_loss)
        if packed:
            builder.pack(folder)
        exported = builder.finish(folder, target, notes)
    if bucket:
        bucket.push()
    return exported


def _refuse_for_pages(form: PageFormat, **options: Any) -> None:
    for option, value in options.items():
        if value is not None:
            raise UsageError(f"--{option.replace('_', '-')} applies to artifacts only, not to --to {form.name}")


def subject_type(folder: Path) -> type[ExportSubject]:
    """Return the export class of a run's task. Raises UsageError if the task cannot be exported."""
    task = task_of_run(folder)
    if task.export is None:
        names = ", ".join(name for name, each in TASKS.items() if each.export)
        raise UsageError(f"{printable(str(folder))} is a run of {task.name}, which cannot be exported; {names} can")
    return task.export
