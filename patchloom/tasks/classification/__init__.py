"""Image classification: one class per image."""

from patchloom.tasks.task import Task

TASK = Task(
    name="classification",
    word="classify",
    training="patchloom.tasks.classification.training:ClassificationTraining",
    model="patchloom.tasks.classification.model:ClassifierLoader",
    report="patchloom.tasks.classification.report:ClassificationReporting",
    export="patchloom.tasks.classification.export:ClassifierSubject",
    serving="patchloom.tasks.classification.serving:ClassifierServing",
    whole_images=True,
)
