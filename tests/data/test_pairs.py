"""Parallel text as it is opened: nothing lost, nothing shifted, every fault with its file and line."""

import gzip

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchloom.data.text.pairs import open_parallel, read_pairs
from patchloom.data.text.sentences import find_sentences
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.text.vocabulary import clean
from tests.conftest import SHARED
from tests.data.facts import any_has, facts, has_facts

GERMAN = [f"Satz {i} über Öl." for i in range(30)]
ENGLISH = [f"Sentence {i} about oil." for i in range(30)]


def write(root, name, lines):
    root.mkdir(parents=True, exist_ok=True)
    content = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
    (root / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


def corpus(root, german=GERMAN, english=ENGLISH, split="train", ending=""):
    write(root, f"{split}.de{ending}", german)
    write(root, f"{split}.en{ending}", english)
    return root


def short(left_out):
    return [(entry.where.rpartition("/")[2], entry.reason) for entry in left_out]


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize(("source", "target"), [("en", "de"), ("de", "en")])
def test_a_folder_of_files(tmp_path, ending, source, target):
    root = corpus(tmp_path / "corpus", ending=ending)
    corpus(root, ["Ja."], ["Yes."], "val", ending)
    corpus(root, ["Nein.", ""], ["No.", "Nothing."], "test_2016", ending)
    text = open_parallel(root, source=source, target=target)
    sides = {"de": GERMAN, "en": ENGLISH}
    assert list(text.train) == list(zip(sides[source], sides[target], strict=True))
    assert list(text.train) == list(text.train)
    assert (text.name, text.source, text.target, text.left_out, text.notes) == ("corpus", source, target, (), ())
    assert list(text.val) == [("Yes.", "Ja.") if source == "en" else ("Ja.", "Yes.")]
    assert set(text.tests) == {"test_2016"}
    assert text.tests["test_2016"].sources() == (["No.", "Nothing."] if source == "en" else ["Nein.", ""])
    assert text.train.where(4).endswith(f"corpus/train.{source}{ending}, line 5")


def test_empty_training_lines_are_left_out_by_name_and_nothing_shifts(tmp_path):
    german, english = list(GERMAN), list(ENGLISH)
    german[3], english[7], german[9], english[9] = "", " \t\u2003", "\x00\x07", ""
    root = corpus(corpus(tmp_path, german, english), ["Ja.", "", "Nein."], ["Yes.", "Perhaps.", ""], "val")
    text = open_parallel(root, source="en", target="de")
    assert [where for where, _ in short(text.left_out)] == ["train.de, line 4", "train.en, line 8", "train.en, line 10"]
    kept = [i for i in range(30) if i not in (3, 7, 9)]
    assert list(text.train) == [(ENGLISH[i], GERMAN[i]) for i in kept]
    assert [text.train.where(i).rpartition(" ")[2] for i in range(27)] == [str(i + 1) for i in kept]
    assert list(text.val) == [("Yes.", "Ja."), ("Perhaps.", ""), ("", "Nein.")]


def test_sides_of_different_numbers_of_lines_are_refused(tmp_path):
    corpus(tmp_path, [*GERMAN, "Noch einer."], ENGLISH)
    with pytest.raises(DataError, match=facts("train.en", 30, "train.de", 31)):
        open_parallel(tmp_path, source="en", target="de")


def test_a_third_language_may_be_short(tmp_path):
    write(corpus(tmp_path), "train.fr", ["Une phrase."])
    assert len(open_parallel(tmp_path, source="en", target="de", val_fraction=0.2).left_out) == 0
    with pytest.raises(DataError, match=facts("train.fr", 1)):
        open_parallel(tmp_path, source="fr", target="de")


@pytest.mark.parametrize("split", ["train", "test"])
def test_bytes_that_are_no_text_are_refused_by_line(tmp_path, split):
    corpus(corpus(tmp_path), [*GERMAN[:5], b"Stra\xdfe"], ENGLISH[:6], split)
    with pytest.raises(DataError, match=facts(f"{split}.de, line 6", "UTF-8", 5, "0xdf")):
        open_parallel(tmp_path, source="en", target="de")


def test_languages_that_are_not_there(tmp_path):
    write(corpus(tmp_path), "train.fr", ["Une phrase."] * 30)
    pairs = ("de-en", "de-fr", "en-fr")
    with pytest.raises(UsageError, match=facts("en-it", *pairs)):
        open_parallel(tmp_path, source="en", target="it")
    with pytest.raises(UsageError, match=r"\ben\b"):
        open_parallel(tmp_path, source="en", target="en")
    with pytest.raises(UsageError, match=facts(*pairs)):
        open_parallel(tmp_path, source="en")


def test_two_languages_need_no_name(tmp_path):
    text = open_parallel(corpus(tmp_path), val_fraction=0.2)
    assert (text.source, text.target) == ("de", "en")
    assert has_facts(text.notes[0], "de", "en")
    assert open_parallel(tmp_path, source="en").target == "de"
    assert open_parallel(tmp_path, target="de").source == "en"


def test_training_files_of_different_languages(tmp_path):
    corpus(tmp_path)
    write(tmp_path, "train2.de", ["Ja."])
    write(tmp_path, "train2.fr", ["Oui."])
    with pytest.raises(DataError, match=facts("train2")):
        open_parallel(tmp_path)


def test_a_test_without_the_languages_is_named(tmp_path):
    root = corpus(corpus(tmp_path), ["Ja."], ["Yes."], "val")
    write(root, "test.de", ["Nein."])
    write(root, "test.fr", ["Non."])
    text = open_parallel(root, source="en", target="de")
    (note,) = text.notes
    assert has_facts(note, "test", "en-de")
    assert text.tests == {}


def test_a_val_without_lines(tmp_path):
    corpus(corpus(tmp_path), [], [], "val")
    with pytest.raises(DataError, match="val"):
        open_parallel(tmp_path, source="en", target="de")


def test_what_is_no_parallel_text(tmp_path):
    with pytest.raises(DataError, match=facts("train.en", "train.de")):
        open_parallel(tmp_path)
    with pytest.raises(UsageError, match="nothing"):
        open_parallel(tmp_path / "nothing")
    corpus(corpus(tmp_path, split="news"), split="talks")
    with pytest.raises(DataError, match=facts("news", "talks", "train")):
        open_parallel(tmp_path)


def test_a_side_that_is_there_twice(tmp_path):
    write(corpus(tmp_path), "train.en.gz", ENGLISH)
    with pytest.raises(DataError, match=r"train\.en"):
        open_parallel(tmp_path)


@pytest.mark.parametrize(("name", "languages"), [("a-en-de.tsv", ("en", "de")), ("pairs.tsv.gz", ("source", "target"))])
def test_tab_separated(tmp_path, name, languages):
    rows = [f"{a}\t{b}\tCC BY" for a, b in zip(ENGLISH, GERMAN, strict=True)]
    rows[6] = "no second field"
    write(tmp_path, name, rows)
    text = open_parallel(tmp_path / name, val_fraction=0.2)
    assert (text.source, text.target) == languages
    assert [where for where, _ in short(text.left_out)] == [f"{name}, line 7"]
    everything = {*text.train, *text.val}
    assert everything == {(a, b) for i, (a, b) in enumerate(zip(ENGLISH, GERMAN, strict=True)) if i != 6}
    if languages[0] == "source":
        assert has_facts(text.notes[0], name, 1, 2)
        named = open_parallel(tmp_path / name, source="en", target="de", val_fraction=0.2)
        assert (named.source, named.target, list(named.train)) == ("en", "de", list(text.train))
    else:
        turned = open_parallel(tmp_path / name, source="de", val_fraction=0.2)
        assert {(b, a) for a, b in [*turned.train, *turned.val]} == everything


@pytest.mark.parametrize("nested", [True, False])
def test_parquet_in_shards(tmp_path, nested):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def table(start, stop):
        rows = [{"de": d, "en": e} for d, e in zip(GERMAN[start:stop], ENGLISH[start:stop], strict=True)]
        return pa.table({"translation": rows} if nested else {n: [row[n] for row in rows] for n in ("de", "en")})

    pq.write_table(table(0, 12), tmp_path / "train-00000-of-00002.parquet")
    pq.write_table(table(12, 25), tmp_path / "train-00001-of-00002.parquet")
    pq.write_table(table(25, 27), tmp_path / "validation-00000-of-00001.parquet")
    pq.write_table(table(27, 30), tmp_path / "test-00000-of-00001.parquet")
    text = open_parallel(tmp_path, source="en", target="de")
    both = list(zip(ENGLISH, GERMAN, strict=True))
    assert list(text.train) == both[:25]
    assert list(text.val) == both[25:27]
    assert list(text.tests["test"]) == both[27:]
    assert text.train.where(13).endswith("of-00002.parquet, " + "translation." * nested + "en, row 1")


def test_a_val_is_made_from_all_shards(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for shard in range(2):
        rows = slice(15 * shard, 15 * shard + 15)
        pq.write_table(pa.table({"de": GERMAN[rows], "en": ENGLISH[rows]}), tmp_path / f"train-{shard}-of-2.parquet")
    text = open_parallel(tmp_path, source="en", target="de", val_fraction=0.3)
    assert sorted([*text.train, *text.val]) == sorted(zip(ENGLISH, GERMAN, strict=True))
    assert {text.val.where(i).partition("-of-2")[0][-1] for i in range(len(text.val))} == {"0", "1"}


def test_a_made_val_keeps_equal_sources_on_one_side(tmp_path):
    english = [f"Sentence {i % 40}." for i in range(200)]
    german = [f"Satz {i}." for i in range(200)]
    text = open_parallel(corpus(tmp_path, german, english), source="en", target="de", val_fraction=0.25)
    assert len(text.train) + len(text.val) == 200
    assert {*text.train.sources()} | {*text.val.sources()} == set(english)
    assert not {*text.train.sources()} & {*text.val.sources()}
    assert 20 <= len(text.val) <= 80
    assert any_has(text.notes, len(text.val))
    again = open_parallel(
        corpus(tmp_path / "b", german[::-1], english[::-1]), source="en", target="de", val_fraction=0.25
    )
    assert set(again.val) == set(text.val)
    other = open_parallel(tmp_path, source="en", target="de", val_fraction=0.25, seed=1)
    assert set(other.val) != set(text.val)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=8), st.sampled_from([None, 0.001, 0.5, 0.999]))
def test_a_made_val_leaves_both_sides_something(tmp_path_factory, sources, fraction):
    root = corpus(tmp_path_factory.mktemp("c"), [f"x{i}" for i in range(len(sources))], sources)
    if len(set(sources)) < 2:
        with pytest.raises(DataError, match=facts("train", "val")):
            open_parallel(root, source="en", target="de", val_fraction=fraction)
        return
    text = open_parallel(root, source="en", target="de", val_fraction=fraction)
    assert len(text.train)
    assert len(text.val)
    assert sorted([*text.train.targets(), *text.val.targets()]) == [f"x{i}" for i in range(len(sources))]


ANY_LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"), max_size=12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(ANY_LINE, ANY_LINE), min_size=1, max_size=12))
def test_no_pair_is_lost_or_shifted(tmp_path_factory, lines):
    root = corpus(tmp_path_factory.mktemp("c"), [de for de, _ in lines], [en for _, en in lines])
    corpus(root, ["Ja."], ["Yes."], "val")
    cleaned = [(clean(en), clean(de)) for de, en in lines]
    assert list(read_pairs(find_sentences(root)[:1], "en", "de")) == cleaned
    kept = [i for i, (en, de) in enumerate(cleaned) if en and de]
    if not kept:
        with pytest.raises(DataError, match="train"):
            open_parallel(root, source="en", target="de")
        return
    text = open_parallel(root, source="en", target="de")
    assert list(text.train) == [cleaned[i] for i in kept]
    assert {int(entry.where.rpartition(" ")[2]) - 1 for entry in text.left_out} == set(range(len(lines))) - set(kept)


@settings(max_examples=100)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_clean_text_stays_as_it_is(text):
    cleaned = clean(text)
    assert clean(cleaned) == cleaned
    assert "\n" not in cleaned
    assert cleaned == cleaned.strip()


def test_what_clean_changes():
    assert clean("\ufeffa\x00b\tc\u00a0\u2028d  ") == "a b c d"
    assert clean("u\u0308ber ▁") == "über _"


@pytest.mark.parametrize("name", ["train.de", "train.en"])
def test_the_file_that_changed_after_it_was_opened_is_named(tmp_path, name):
    text = open_parallel(corpus(tmp_path), source="en", target="de")
    write(tmp_path, name, ["Anderes.", *GERMAN])
    with pytest.raises(DataError, match=facts(name)) as error:
        list(text.train)
    assert ({"train.de", "train.en"} - {name}).pop() not in str(error.value)


def test_a_sample_is_spread_over_the_text(tmp_path):
    root = corpus(corpus(tmp_path), ["Ja."], ["Yes."], "val")
    train = open_parallel(root, source="en", target="de").train
    assert [source for source, _ in train.sample(10)] == ENGLISH[::3]
    assert list(train.sample(100)) == list(train)


def test_numbers_are_built_in():
    text = open_parallel("numbers")
    assert text.name.startswith("numbers (")
    assert (text.source, text.target) == ("en", "de")
    assert (len(text.train), len(text.val), len(text.tests["test"])) == (4000, 200, 200)
    assert open_parallel("numbers", target="en").source == "de"
    assert open_parallel("numbers:fr-en,count=200").train.sources()[21] == "vingt et un"
    with pytest.raises(UsageError, match=facts("it", "en-de", "en-fr", "de-fr")):
        open_parallel("numbers", target="it")


@pytest.mark.skipif(not (SHARED / "data" / "multi30k").is_dir(), reason="no real data in ../shared/data")
def test_real_texts():
    text = open_parallel(SHARED / "data" / "multi30k", source="en", target="de")
    assert (len(text.train), len(text.val), len(text.tests)) == (29_000, 1014, 4)
    assert text.left_out == ()
    text = open_parallel(SHARED / "data" / "tatoeba-en-de.tsv.gz")
    assert len(text.train) + len(text.val) == 169_813
    assert not {*text.train.sources()} & {*text.val.sources()}
