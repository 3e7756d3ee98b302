"""Splitting text into words and punctuation marks, for tokenized BLEU and for cleaning a corpus.

The rules follow Moses' tokenizer in outline: marks are separate tokens, except in numbers (1,000.5), inside words (e.g.
hyphens), in a row of dots, after abbreviations and, by language, in elisions (don 't, l' homme). Its escaping of
special characters and its long lists of abbreviations are omitted, so single sentences may differ.
"""

import re

_ABBREVIATIONS = {
    "en": {"mr", "mrs", "ms", "dr", "prof", "st", "vs", "no", "e.g", "i.e", "jr", "sr", "gen", "sen", "rep", "gov"},
    "de": {"dr", "prof", "hr", "fr", "nr", "bzw", "ca", "d.h", "z.b", "u.a", "usw", "str", "abs", "art", "evtl", "ggf"},
    "fr": {"m", "mm", "mme", "mlle", "dr", "pr", "st", "ste", "etc", "cf", "art", "p.ex"},
}
_PUNCTUATION = {
    **dict.fromkeys("„“”«»‟", '"'),
    **dict.fromkeys("‘’‚‛‹›`´", "'"),
    **dict.fromkeys("‐‑–−", "-"),
    "—": " - ",
    "…": "...",
}
_TABLE = str.maketrans(_PUNCTUATION)

# Everything but letters, digits, spaces and . , ' - is a separate token; combining marks belong to their letters.
_MARK = re.compile(r"([^\w\s.,'\-\u0300-\u036f]|_)")
_DOTS = re.compile(r"(\.{2,})")
_COMMA = re.compile(r"(?<!\d),|,(?!\d)")
_APOSTROPHE = {
    # don't → don 't; 1990's → 1990 's; rock'n' → rock ' n '
    "en": (re.compile(r"(?<=\w)'(?=[^\W\d_])"), " '"),
    # l'homme → l' homme
    "fr": (re.compile(r"(?<=[^\W\d_])'(?=[^\W\d_])"), "' "),
}
_LONE_APOSTROPHE = re.compile(r"(?<!\w)'|'(?!\w)")
_ANY_APOSTROPHE = re.compile(r"'")


def normalize_punctuation(text: str) -> str:
    """Replace typographic quotation marks, apostrophes, dashes and ellipses by ASCII; single spaces."""
    return " ".join(text.translate(_TABLE).split())


def words(text: str, language: str = "") -> list[str]:
    """Return the words and marks of a text; languages without rules of their own use the shared ones."""
    text = _MARK.sub(r" \1 ", text)
    text = _DOTS.sub(r" \1 ", text)
    text = _COMMA.sub(" , ", text)
    if language in _APOSTROPHE:
        pattern, split = _APOSTROPHE[language]
        text = _LONE_APOSTROPHE.sub(" ' ", text)
        text = pattern.sub(split, text)
    else:
        text = _ANY_APOSTROPHE.sub(" ' ", text)
    tokens = text.split()
    return [part for i, word in enumerate(tokens) for part in _split_stop(word, tokens[i + 1 : i + 2], language)]


def _split_stop(word: str, following: list[str], language: str) -> list[str]:
    """Split off a full stop at a word's end, unless the word is an abbreviation or the sentence continues."""

    stem = word[:-1]
    if not word.endswith(".") or not stem.strip("."):
        return [word]
    is_short = "." in stem or stem.lower() in _ABBREVIATIONS.get(language, ())
    goes_on = bool(following) and following[0][0].islower()
    if following and (goes_on or (is_short and any(map(str.isalpha, stem)))):
        return [word]
    return [stem, "."]
