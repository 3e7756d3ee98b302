"""Object detection: boxes, classes and, where the data has them, masks."""

from patchloom.tasks.task import Task

TASK = Task(
    name="detection",
    word="detect",
    noun="detector",
    training="patchloom.tasks.detection.training:DetectionTraining",
    model="patchloom.tasks.detection.model:DetectorLoader",
    report="patchloom.tasks.detection.report:DetectionReporting",
    export="patchloom.tasks.detection.export:DetectorSubject",
    serving="patchloom.tasks.detection.serving:DetectorServing",
    refusal="applies to classes of whole images; drop it for detection",
)
