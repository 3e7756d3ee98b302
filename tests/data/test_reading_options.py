"""What is said about data travels as one value."""

import pytest

from patchloom.data.reading_options import Reading
from patchloom_runtime.errors import UsageError
from tests.data.facts import facts


def test_options_are_those_of_the_command_line_and_quoted():
    assert Reading().options() == ""
    reading = Reading(labels="my labels.csv", label_column="kind", classes="outermost")
    assert reading.options() == " --labels 'my labels.csv' --label-column kind --classes outermost"


def test_what_is_given_goes_before_what_is_remembered():
    given, remembered = Reading(labels="new.csv"), Reading(labels="old.csv", taxonomy="t.csv")
    assert given.filled_from(remembered) == Reading(labels="new.csv", taxonomy="t.csv")
    assert remembered.filled_from(Reading()) == remembered


def test_other_classes_than_the_two_are_refused():
    with pytest.raises(UsageError, match=facts("classes", "'middle'", "innermost", "outermost")):
        Reading(classes="middle")
