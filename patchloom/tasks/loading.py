"""`patchloom.load`: the trained model of a run, whatever its task."""

import os
from typing import Any

from patchloom.errors import with_near_options
from patchloom.runs.named import run_folder
from patchloom.tasks.table import task_of_run


@with_near_options
def load(source: str | os.PathLike[str], *, device: str = "auto", trunk: bool = False) -> Any:
    """The model of a run folder, of published weights ('resmlp_s12:in1k'), or of the hub ('hub:user/name').

    `trunk` leaves a projector out, so that images are compared by the vectors it was given.
    """
    if trunk:
        from patchloom.deployment.classifier import load as load_classifier

        return load_classifier(source, device=device, trunk=True)
    folder = run_folder(source)
    return task_of_run(folder).predictor(folder, device=device)
