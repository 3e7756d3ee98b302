import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchloom.data.text.words import normalize_punctuation, words


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("en", "Don't pay $1,000.50, Mr. Smith.", "Don 't pay $ 1,000.50 , Mr. Smith ."),
        ("en", "The U.S. team (5%)... it's off-season!", "The U.S. team ( 5 % ) ... it 's off-season !"),
        ("en", "He said 'no'.", "He said ' no ' ."),
        ("de", "Das ist z.B. gut, 3,5 Mio. Euro.", "Das ist z.B. gut , 3,5 Mio . Euro ."),
        ("de", "„Wie geht's?“", "„ Wie geht ' s ? “"),
        ("fr", "L'homme qu'il a vu, c'est M. Dupont !", "L' homme qu' il a vu , c' est M. Dupont !"),
        ("", "Abc. abc", "Abc. abc"),
        ("", "...", "..."),
        ("", "a_b [c]", "a _ b [ c ]"),
        ("", "", ""),
    ],
)
def test_words_and_marks(language, text, expected):
    assert words(text, language) == expected.split()


@settings(max_examples=50)
@given(st.text(), st.sampled_from(["", "en", "de", "fr"]))
def test_no_character_is_lost(text, language):
    assert "".join(words(text, language)) == "".join(text.split())


def test_punctuation_of_a_keyboard():
    text = "„So“, sagt sie – «non»… it’s—well ‘fine’"
    assert normalize_punctuation(text) == '"So", sagt sie - "non"... it\'s - well \'fine\''
