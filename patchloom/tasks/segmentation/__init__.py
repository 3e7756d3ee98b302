"""Semantic segmentation: one class per pixel."""

from patchloom.tasks.task import Task

TASK = Task(
    name="segmentation",
    word="segment",
    noun="segmenter",
    training="patchloom.tasks.segmentation.training:SegmentationTraining",
    model="patchloom.tasks.segmentation.model:SegmenterLoader",
    report="patchloom.tasks.segmentation.report:SegmentationReporting",
    export="patchloom.tasks.segmentation.export:SegmenterSubject",
    serving="patchloom.tasks.segmentation.serving:SegmenterServing",
    refusal="applies to whole images; drop it for segmentation",
)
