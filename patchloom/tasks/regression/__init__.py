"""Regression: one or several numbers per image, or an ordinal label."""

from patchloom.tasks.task import Task

TASK = Task(
    name="regression",
    word="regress",
    noun="regression model",
    training="patchloom.tasks.regression.training:RegressionTraining",
    model="patchloom.tasks.regression.model:RegressorLoader",
    report="patchloom.tasks.regression.report:RegressionReporting",
    export="patchloom.tasks.regression.export:RegressorSubject",
    serving="patchloom.tasks.regression.serving:RegressorServing",
    refusal="applies to classes; drop it for regression",
)
