"""Multi-label classification: any number of labels per image."""

from patchloom.tasks.task import Task

TASK = Task(
    name="multilabel",
    word="multilabel",
    noun="multi-label classifier",
    training="patchloom.tasks.multilabel.training:MultilabelTraining",
    model="patchloom.tasks.multilabel.model:MultilabelLoader",
    report="patchloom.tasks.multilabel.report:MultilabelReporting",
    export="patchloom.tasks.multilabel.export:MultilabelSubject",
    serving="patchloom.tasks.multilabel.serving:MultilabelServing",
    refusal="applies to one class per image; drop it for several labels",
)
