"""Translation of sentences."""

from patchloom.tasks.task import Task

TASK = Task(
    name="translation",
    noun="translator",
    training="patchloom.tasks.translation.training:TranslationTraining",
    model="patchloom.tasks.translation.model:TranslatorLoader",
    report="patchloom.tasks.translation.report:TranslationReporting",
    export="patchloom.tasks.translation.export:TranslatorSubject",
    serving="patchloom.tasks.translation.serving:TranslatorServing",
    refusal="applies to images; drop it for translation",
)
