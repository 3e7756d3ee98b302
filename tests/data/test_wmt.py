"""WMT'14 from a small excerpt in the official layout."""

import gzip
import json

import pytest

from patchloom.data.text.pairs import open_parallel
from patchloom.data.text.wmt import prepare_wmt14, read_sgm
from patchloom_runtime.errors import DataError, UsageError
from tests.data.facts import any_has, facts, has_facts
from tests.reliability.commands import command

CORPORA = {
    "de": ["training/europarl-v7.de-en", "commoncrawl.de-en", "training/news-commentary-v9.de-en"],
    "fr": [
        "training/europarl-v7.fr-en",
        "commoncrawl.fr-en",
        "un/undoc.2000.fr-en",
        "training/news-commentary-v9.fr-en",
        "giga-fren.release2.fixed",
    ],
}


def put(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def sgm(path, kind, segments):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f'<{kind} setid="newstest2014" srclang="any">', '<doc sysid="ref" docid="paper-1" genre="news">', "<p>"]
    lines += [f'<seg id="{n}">{text}</seg>' for n, text in enumerate(segments, 1)]
    lines += ["</p>", "</doc>", '<doc docid="paper-2">', '<seg id="1"> Last\n one </seg>', "</doc>", f"</{kind}>"]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def official(root, other="de"):
    for number, corpus in enumerate(CORPORA[other]):
        ending = ".gz" if corpus.startswith("giga") else ""
        put(root / f"{corpus}.en{ending}", [f"This is English line {n} of corpus {number}." for n in range(1, 9)])
        put(root / f"{corpus}.{other}{ending}", [f"Ligne autre {n} de la liste {number}." for n in range(1, 9)])
    sgm(root / f"test-full/newstest2014-{other}en-src.en.sgm", "srcset", ["A “dog” &amp; a cat", "Second"])
    sgm(
        root / f"test-full/newstest2014-{other}en-ref.{other}.sgm", "refset", ["Ein „Hund“ &amp; eine Katze", "Zweites"]
    )
    if other == "de":
        put(root / "dev/newstest2013.en", ["Val “one”", "Val two"])
        put(root / "dev/newstest2013.de", ["Val „eins“", "Val zwei"])
    return root


def lines(path):
    return path.read_text("utf-8").splitlines()


def test_english_german(tmp_path):
    root = official(tmp_path / "orig")
    english, german = (root / f"commoncrawl.de-en.{language}" for language in ("en", "de"))
    rows = [lines(english), lines(german)]
    rows[0][1], rows[1][1] = "", "Ohne Gegenstück"
    rows[0][2], rows[1][2] = "word " * 251, "Wort " * 251
    rows[0][3], rows[1][3] = "one two three four", "eins zwei"
    rows[0][4], rows[1][4] = "He said: “it’s here” — now…", "Er sagt: „es ist da“ – jetzt."
    put(english, rows[0])
    put(german, rows[1])
    out = tmp_path / "wmt14"
    prepared = prepare_wmt14(root, "en-de", out)
    assert prepared.counts == {"train": 21, "val": 2, "test": 3}
    assert list(prepared.left_out.values()) == [1, 1, 1]
    assert any_has(prepared.left_out, 250)
    assert any_has(prepared.left_out, "1.5")
    assert json.loads((out / "prepared.json").read_text())["counts"] == prepared.counts
    rows = [line.rpartition("/")[2].split("\t") for line in lines(out / "left_out.tsv")]
    assert [where for where, _ in rows] == [f"commoncrawl.de-en.en, line {i}" for i in (2, 3, 4)]
    assert has_facts(rows[1][1], 251, 250)
    assert has_facts(rows[2][1], 4, 2, "1.5")
    assert 'He said: "it\'s here" - now...' in lines(out / "train.en")
    place = lines(out / "train.en").index('He said: "it\'s here" - now...')
    assert lines(out / "train.de")[place] == 'Er sagt: "es ist da" - jetzt.'
    assert lines(out / "val.en") == ['Val "one"', "Val two"]
    assert lines(out / "val.de") == ["Val „eins“", "Val zwei"]
    assert lines(out / "test.en") == ['A "dog" & a cat', "Second", "Last one"]
    assert lines(out / "test.de") == ["Ein „Hund“ & eine Katze", "Zweites", "Last one"]
    text = open_parallel(out, source="en", target="de")
    assert (len(text.train), len(text.val), len(text.tests["test"])) == (21, 2, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["orig", "wmt14"]


def test_english_french_holds_out_every_nth_line(tmp_path):
    root = official(tmp_path / "orig", "fr")
    out = tmp_path / "out"
    assert prepare_wmt14(root, "en-fr", out, val_every=8).counts == {"train": 35, "val": 5, "test": 3}
    assert lines(out / "val.en") == [f"This is English line 8 of corpus {n}." for n in range(5)]
    with pytest.raises(DataError, match="val"):
        prepare_wmt14(root, "en-fr", tmp_path / "usual")  # one of 1,333
    assert not (tmp_path / "usual").exists()


def test_by_command(tmp_path, monkeypatch, capsys):
    root, out = official(tmp_path / "orig"), tmp_path / "text"
    done = command(("prepare", "wmt14", root, "--val-every", "5", "--out", out, "--json"), monkeypatch, capsys)
    assert json.loads(done.output)["counts"] == {"train": 20, "val": 4, "test": 3}
    assert len(lines(out / "val.en")) == 4
    again = command(("prepare", "wmt14", root, "--out", out), monkeypatch, capsys)
    assert again.code == 2
    assert has_facts(again.errors, out)
    unknown = command(("prepare", "wmt", root), monkeypatch, capsys)
    assert unknown.code == 2
    assert has_facts(unknown.errors, "'wmt'", "wmt14")


def test_every_nth_line_counts_lines_that_are_left_out(tmp_path):
    root = official(tmp_path / "orig")
    put(root / "training/europarl-v7.de-en.en", ["", *(f"This is line {n} of all lines." for n in range(2, 9))])
    prepare_wmt14(root, "en-de", tmp_path / "out", val_every=5)
    assert lines(tmp_path / "out/val.en")[:2] == ["This is line 5 of all lines.", "This is English line 2 of corpus 1."]


def test_what_is_missing_is_named_with_its_archive(tmp_path):
    root = official(tmp_path / "orig")
    (root / "commoncrawl.de-en.de").unlink()
    (root / "dev/newstest2013.en").unlink()
    put(root / "training-parallel-commoncrawl.tgz", [])
    with pytest.raises(
        DataError,
        match=facts(
            "commoncrawl.de-en.de",
            "/wmt13/training-parallel-commoncrawl.tgz",
            "newstest2013.en",
            "/wmt14/dev.tgz",
        ),
    ):
        prepare_wmt14(root, "en-de", tmp_path / "out")
    with pytest.raises(DataError, match="nowhere"):
        prepare_wmt14(tmp_path / "nowhere", "en-de", tmp_path / "out")


def test_mistakes_leave_nothing_behind(tmp_path):
    root = official(tmp_path / "orig")
    with pytest.raises(UsageError, match=facts("'en-it'", "en-de", "en-fr")):
        prepare_wmt14(root, "en-it", tmp_path / "out")
    with pytest.raises(UsageError, match=facts(root)):
        prepare_wmt14(root, "en-de", root)
    with pytest.raises(UsageError, match=facts("val_every", 1)):
        prepare_wmt14(root, "en-de", tmp_path / "out", val_every=1)
    put(root / "commoncrawl.de-en.en", ["Only one."])
    with pytest.raises(DataError, match=facts("commoncrawl.de-en.en", 1, "commoncrawl.de-en.de", 8)):
        prepare_wmt14(root, "en-de", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["orig"]


def test_test_files_that_do_not_belong_together(tmp_path):
    root = official(tmp_path / "orig")
    sgm(root / "test-full/newstest2014-deen-ref.de.sgm", "refset", ["Nur eines"])
    with pytest.raises(DataError, match=facts(3, 2, "newstest2014-deen-ref.de.sgm")):
        prepare_wmt14(root, "en-de", tmp_path / "out")
    (tmp_path / "bad.sgm").write_bytes(b'<doc docid="a">\n<seg id="1">Stra\xdfe</seg>')
    with pytest.raises(DataError, match=facts("bad.sgm", "line 2", "UTF-8")):
        read_sgm(tmp_path / "bad.sgm")
    (tmp_path / "no.sgm").write_text("nothing")
    with pytest.raises(DataError, match=facts("no.sgm", "<seg id=")):
        read_sgm(tmp_path / "no.sgm")
