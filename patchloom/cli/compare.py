"""`patchloom compare RUN RUN… [DATA]`: several runs on the same images, side by side."""

from dataclasses import dataclass
from typing import Annotated

from patchloom.cli.evaluate import (
    EvaluationOptions,
    check_image_options,
    evaluate_images,
    evaluate_task,
    runs_and_data,
)
from patchloom.cli.options import changed
from patchloom.options import Option


@dataclass(frozen=True, kw_only=True)
class CompareOptions(EvaluationOptions):
    seeds: Annotated[bool, Option("Mean, std, min and max over runs that differ only in their seed.")] = False
    agreement: Annotated[bool, Option("How often runs, their heads and the labels disagree.")] = False


def compare(options: CompareOptions) -> None:
    """Compare runs on the same images: numbers side by side, and the significance of every difference.

    patchloom compare runs/a runs/b photos/

    patchloom compare runs/seed0 runs/seed1 runs/seed2 --seeds
    """
    from patchloom.cli.evaluation_tables import print_evaluations
    from patchloom.tasks.evaluate import task_of_runs
    from patchloom_runtime.errors import UsageError

    runs, data = runs_and_data(options)
    task = task_of_runs(runs)
    views = changed(options, "agreement", "seeds")
    if not task.whole_images:
        evaluate_task(task, runs, data, options, views + changed(options, "cost"))
        return
    check_image_options(options, runs, data, [])
    if len(runs) < 2 and (options.seeds or not views):
        what = "--seeds" if options.seeds else "compare"
        read_as_data = f"; {data} is not a run folder, so it was read as the data" if data else ""
        raise UsageError(f"{what} needs two or more runs, got {runs[0]}{read_as_data}")
    print_evaluations(
        evaluate_images(runs, data, options, heads=options.agreement),
        agreement=options.agreement,
        seeds=options.seeds,
        cost=options.cost,
        device=options.device,
        as_json=options.as_json,
    )
