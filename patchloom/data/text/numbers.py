"""The built-in parallel text: numbers below a million spelled out in English, German and French.

    numbers             English → German
    numbers:fr-en       another pair
    numbers:count=500,seed=1

    471  four hundred seventy-one  vierhunderteinundsiebzig  quatre cent soixante et onze

German swaps tens and ones and writes one word, French counts in twenties: a translation has to move, split and join
words.
"""

# ruff: noqa: SIM905  (twenty words read better in a row)
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from patchloom.data.text.sentences import SentenceSplit, Sides
from patchloom_runtime.errors import UsageError, nearest

_LARGEST = 999_999
_COUNTS = {"train": 4000, "val": 200, "test": 200}
_ALWAYS_IN_TRAIN = 100  # 0 … 99: a random sample would contain hardly any short numbers

_EN_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_EN_TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()
_DE_ONES = (
    "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn "
    "achtzehn neunzehn"
).split()
_DE_TENS = "- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()
_FR_ONES = (
    "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize dix-sept dix-huit "
    "dix-neuf"
).split()
_FR_TENS = "- - vingt trente quarante cinquante soixante soixante quatre-vingt quatre-vingt".split()


def english(number: int) -> str:
    """Spell a number in English; 999: nine hundred ninety-nine."""
    if number >= 1000:
        return _joined(" ", f"{english(number // 1000)} thousand", number % 1000, english)
    if number >= 100:
        return _joined(" ", f"{_EN_ONES[number // 100]} hundred", number % 100, english)
    if number >= 20:
        return _joined("-", _EN_TENS[number // 10], number % 10, english)
    return _EN_ONES[number]


def german(number: int) -> str:
    """Spell a number in German; 999: neunhundertneunundneunzig. A final one is 'eins'."""
    return _german(number) + "s" * (number % 100 == 1)


def french(number: int) -> str:
    """Spell a number in French, as before 1990; 999: neuf cent quatre-vingt-dix-neuf."""
    return _french(number, last=True)


SPELLED: dict[str, Callable[[int], str]] = {"en": english, "de": german, "fr": french}


def find_numbers(options: str = "") -> tuple[list[SentenceSplit], tuple[str, str]]:
    """Return the splits and the language pair of `options`, English → German by default."""
    values, pair = {"count": _COUNTS["train"], "seed": 0}, ("en", "de")
    for option in filter(None, options.split(",")):
        name, _, value = option.partition("=")
        source, _, target = option.partition("-")
        if source in SPELLED and target in SPELLED and source != target:
            pair = source, target
        elif name in values and value.isdecimal():
            values[name] = int(value)
        else:
            known = [*values, *(f"{a}-{b}" for a in SPELLED for b in SPELLED if a != b)]
            hint = nearest(name, known)
            raise UsageError(f"numbers:{option} is not an option; expected one of {', '.join(known)}.{hint}")
    count, most = values["count"], _LARGEST + 1 - _COUNTS["val"] - _COUNTS["test"]
    if not _ALWAYS_IN_TRAIN < count <= most:
        raise UsageError(f"numbers of count={count}; expected {_ALWAYS_IN_TRAIN + 1} … {most:,}")
    return list(_splits(count, values["seed"])), pair


def _splits(count: int, seed: int) -> Iterator[SentenceSplit]:
    drawn = np.random.default_rng(seed).permutation(np.arange(_ALWAYS_IN_TRAIN, _LARGEST + 1))
    sizes = [count - _ALWAYS_IN_TRAIN, _COUNTS["val"], _COUNTS["test"]]
    parts = np.split(drawn[: sum(sizes)], np.cumsum(sizes[:-1]))
    parts[0] = np.concatenate([np.arange(_ALWAYS_IN_TRAIN), parts[0]])
    languages = tuple(SPELLED)
    for name, numbers in zip(_COUNTS, parts, strict=True):
        sides = tuple(f"numbers of seed {seed}, {name}.{language}" for language in languages)
        yield SentenceSplit(name, sides, "line", languages, (), partial(_read, numbers.tolist(), languages))


def _read(numbers: Sequence[int], languages: Sequence[str], sides: Sequence[int]) -> Iterator[Sides]:
    for number in numbers:
        yield [SPELLED[languages[side]](number) for side in sides]


def _joined(mark: str, first: str, rest: int, spell: Callable[[int], str]) -> str:
    return f"{first}{mark}{spell(rest)}" if rest else first


def _german(number: int) -> str:
    if number >= 1000:
        return _joined("", f"{_german(number // 1000)}tausend", number % 1000, _german)
    if number >= 100:
        return _joined("", f"{_DE_ONES[number // 100]}hundert", number % 100, _german)
    if number >= 20:
        tens, ones = divmod(number, 10)
        return f"{_DE_ONES[ones]}und{_DE_TENS[tens]}" if ones else _DE_TENS[tens]
    return _DE_ONES[number]


def _french(number: int, last: bool) -> str:
    """Spell a number; `last` if nothing follows: only then do 'cents' and 'vingts' end in s."""
    if number >= 1000:
        thousands = _french(number // 1000, last=False) + " " if number >= 2000 else ""
        return _joined(" ", f"{thousands}mille", number % 1000, french)
    if number >= 100:
        hundreds, rest = divmod(number, 100)
        first = f"{_FR_ONES[hundreds]} cent" if hundreds > 1 else "cent"
        return _joined(" ", first + "s" * (hundreds > 1 and not rest and last), rest, partial(_french, last=last))
    if number < 20:
        return _FR_ONES[number]
    tens, ones = divmod(number, 10)
    if tens in (7, 9):
        ones += 10
    if not ones:
        return _FR_TENS[tens] + "s" * (tens == 8 and last)
    # vingt et un … soixante et onze, but quatre-vingt-un, quatre-vingt-onze
    mark = " et " if ones in (1, 11) and tens < 8 else "-"
    return f"{_FR_TENS[tens]}{mark}{_FR_ONES[ones]}"
