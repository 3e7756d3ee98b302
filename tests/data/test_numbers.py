import pytest

from patchloom.data.text.numbers import SPELLED, english, find_numbers, french, german
from patchloom_runtime.errors import UsageError
from tests.data.facts import facts


@pytest.mark.parametrize(
    ("number", "in_english", "in_german", "in_french"),
    [
        (0, "zero", "null", "zéro"),
        (1, "one", "eins", "un"),
        (12, "twelve", "zwölf", "douze"),
        (16, "sixteen", "sechzehn", "seize"),
        (17, "seventeen", "siebzehn", "dix-sept"),
        (21, "twenty-one", "einundzwanzig", "vingt et un"),
        (30, "thirty", "dreißig", "trente"),
        (71, "seventy-one", "einundsiebzig", "soixante et onze"),
        (77, "seventy-seven", "siebenundsiebzig", "soixante-dix-sept"),
        (80, "eighty", "achtzig", "quatre-vingts"),
        (81, "eighty-one", "einundachtzig", "quatre-vingt-un"),
        (91, "ninety-one", "einundneunzig", "quatre-vingt-onze"),
        (100, "one hundred", "einhundert", "cent"),
        (101, "one hundred one", "einhunderteins", "cent un"),
        (200, "two hundred", "zweihundert", "deux cents"),
        (1000, "one thousand", "eintausend", "mille"),
        (1999, "one thousand nine hundred ninety-nine", "eintausendneunhundertneunundneunzig",
         "mille neuf cent quatre-vingt-dix-neuf"),
        (80_000, "eighty thousand", "achtzigtausend", "quatre-vingt mille"),
        (101_001, "one hundred one thousand one", "einhunderteintausendeins", "cent un mille un"),
        (200_200, "two hundred thousand two hundred", "zweihunderttausendzweihundert", "deux cent mille deux cents"),
        (999_999, "nine hundred ninety-nine thousand nine hundred ninety-nine",
         "neunhundertneunundneunzigtausendneunhundertneunundneunzig",
         "neuf cent quatre-vingt-dix-neuf mille neuf cent quatre-vingt-dix-neuf"),
    ],
)  # fmt: skip
def test_known_numbers(number, in_english, in_german, in_french):
    assert (english(number), german(number), french(number)) == (in_english, in_german, in_french)


@pytest.mark.parametrize("language", SPELLED)
def test_no_two_numbers_are_spelled_alike(language):
    numbers = [*range(3000), *range(3000, 1_000_000, 997)]
    assert len({SPELLED[language](number) for number in numbers}) == len(numbers)


def read(split):
    return [tuple(sides) for sides in split.read([0, 1, 2])]


def test_splits_are_disjoint_and_follow_from_the_seed():
    splits, pair = find_numbers()
    assert pair == ("en", "de")
    texts = {split.name: read(split) for split in splits}
    assert {name: len(text) for name, text in texts.items()} == {"train": 4000, "val": 200, "test": 200}
    assert len({row for text in texts.values() for row in text}) == 4400
    assert texts["train"][21] == ("twenty-one", "einundzwanzig", "vingt et un")
    assert [read(split) for split in find_numbers("seed=0")[0]] == list(texts.values())
    assert read(find_numbers("seed=1")[0][2]) != texts["test"]


def test_options():
    splits, pair = find_numbers("de-fr,count=150")
    assert (len(read(splits[0])), pair) == (150, ("de", "fr"))
    with pytest.raises(UsageError, match=facts("en-it", "count", "seed", "en-de", "en-fr")):
        find_numbers("en-it")
    with pytest.raises(UsageError, match=facts("count=7", 101)):
        find_numbers("count=7")
