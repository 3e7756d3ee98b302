"""Display of objects: one line in a terminal; well-formed, escaped and self-contained HTML in a notebook."""

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import patchloom
from patchloom.engine.loop import TrainResult
from patchloom.engine.state import Progress
from patchloom.evaluation.embeddings import Embeddings
from patchloom.inference.classifier import Classifier, Prediction
from patchloom.inference.search import SearchHit, SearchResult
from patchloom.report.notebook import first_names, html_card, likeliest, number_texts
from patchloom.report.pictures.look import MAX_LOOKS
from patchloom.tasks.classification.several_runs import RunEvaluations
from patchloom.training.run import TrainingResult

EVIL = "<script>alert('x')</script>\x1b[31m\n&"


@pytest.fixture(scope="module")
def classifier(trained: Path) -> Classifier:
    return patchloom.load(trained / "a", device="cpu")


class Balanced(HTMLParser):
    """A parser that checks that elements are closed and nothing is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs) -> None:
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("img", "br", "wbr", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "rect":
            assert self.open.pop() == tag


def checked(html: str) -> str:
    parser = Balanced()
    parser.feed(html)
    assert parser.open == []
    assert all(address.startswith("data:image/") for address in parser.addresses)
    assert not parser.tags & {"script", "link", "iframe", "a"}
    assert "http" not in html
    # The style touches nothing but what is inside.
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    selectors = re.findall(r"([^{};]+)\{[^{}]*\}", re.sub(r"@media[^{]*\{", "", style))
    assert all(".patchloom" in one for selector in selectors for one in selector.split(","))
    return html


def test_a_classifier_and_its_answers(classifier: Classifier, trained: Path) -> None:
    assert re.fullmatch(r"Classifier\(resmlp_s12\b.*\b16×16\b.*\bcpu\b.*\b2\b.*\bblue, red\)", repr(classifier))
    html = checked(classifier._repr_html_())
    assert "resmlp_s12" in html
    assert "blue, red" in html
    path = str(trained / "data" / "red" / "0.png")
    (answer,) = classifier.predict_files([path])
    assert re.fullmatch(rf"Prediction\({re.escape(path)}: \w+ \d+\.\d %, \w+ \d+\.\d %\)", repr(answer))
    assert repr(Prediction("a.png", [], "b.png: empty")) == "Prediction(a.png: b.png: empty)"


def test_a_look_has_image_bars_and_maps(trained: Path) -> None:
    seeing = patchloom.load(trained / "vit", device="cpu")
    images = [trained / "data" / "red" / "0.png"] * (MAX_LOOKS + 2)
    looks = seeing.look(images)
    one = looks[0]
    assert re.fullmatch(r"ImageLook\((blue|red) \d+\.\d %, (blue|red) \d+\.\d %.*\brollout\b.*\)", repr(one))
    html = checked(one._repr_html_())
    assert html.count("<img") == 1 + len(one.maps)
    assert html.count('<b style="width') == 2
    many = checked(looks._repr_html_())
    assert re.search(r"\b22\b", many)
    assert re.search(r"\b2\b[^<>]*<", many)
    assert many.count('class="look"') == MAX_LOOKS


def test_evaluations(trained: Path, classifier: Classifier) -> None:
    both = patchloom.evaluate([trained / "a", trained / "b"])
    assert re.fullmatch(r"RunEvaluations\(12\b.* a top1 [\d.]+ % \([\d.]+…[\d.]+\).* b top1 .*\)", repr(both))
    html = checked(both._repr_html_())
    assert re.search(r"\ba\b.*\bb\b.*[+−][\d.]+.*\(.*\).*\bp = [\d.]+", html)
    one = next(iter(both.evaluations.values()))
    assert re.match(r"Evaluation\(12\b.*\b2\b.* top1 [\d.]+ % \([\d.]+…[\d.]+\), loss ", repr(one))
    assert "mean_class_accuracy" in checked(one._repr_html_())
    assert re.match(r"ClassificationReport\(12\b.*\b2\b.* top1 ", repr(one.report))
    assert "p = " not in RunEvaluations({"a": trained}, {"a": one})._repr_html_()
    probes = classifier.probe(str(trained / "data"), knn=(3,))
    assert re.fullmatch(r"Probes\(knn3_top1 [\d.]+ %\)", repr(probes))
    assert "knn3_top1" in checked(probes._repr_html_())


def test_a_training(trained: Path) -> None:
    done = TrainingResult(
        Path("runs/a"), TrainResult("finished", Progress()), {"top1": 93.2, "loss": 0.25, "images": 1200.0}, 2
    )
    assert re.fullmatch(r"Trained\(runs/a\b.*\bfinished\b.*\b93\.20 %.*\b0\.25\b.*\b1,200\)", repr(done))
    html = checked(done._repr_html_())
    assert "93.20 %" in html
    assert re.search(r">2<", html)
    assert repr(TrainingResult(Path("runs/a"), None, {})).startswith("Trained(runs/a")


def test_an_index_and_its_search_results(trained: Path, tmp_path: Path) -> None:
    index = patchloom.index(str(trained / "a"), [trained / "data"], out=tmp_path / "i", device="cpu").index
    assert re.fullmatch(rf"Index\({tmp_path / 'i'}\b.*\b60\b.*\b2\b.*\b16\b.*\)", repr(index))
    assert "exact" in checked(index._repr_html_())
    query = trained / "data" / "red" / "0.png"
    result = index.search(query, top=5)
    assert re.fullmatch(r"SearchResult\(0\.png: \S+ 1\.0000, \S+ [\d.]+, \S+ [\d.]+\b.*\b2\b.*\)", repr(result))
    assert checked(result._repr_html_()).count("<img") == 6
    assert checked(index.search(Image.open(query).copy(), top=5)._repr_html_()).count("<img") == 5
    gone = SearchResult("gone.png", [], error="gone.png: missing")
    assert repr(gone) == "SearchResult(gone.png: missing)"
    assert "missing" in checked(gone._repr_html_())
    assert "deleted.png" in checked(SearchResult("", [SearchHit("/x/deleted.png", 0.5, "")])._repr_html_())


def test_embeddings() -> None:
    labels = torch.zeros(3, dtype=torch.int64)
    assert re.fullmatch(r"Embeddings\(3\b.*\b5\b.*\bcpu\)", repr(Embeddings(torch.zeros(3, 5), labels, labels)))


def test_names_from_outside_are_neither_markup_nor_control(trained: Path) -> None:
    result = SearchResult(f"/x/{EVIL}.png", [SearchHit(f"/x/{EVIL}", 0.5, EVIL)], EVIL)
    for text in (
        repr(result),
        repr(Prediction(EVIL, [(EVIL, 0.5)])),
        first_names([EVIL]),
        likeliest([(EVIL, 1)]),
    ):
        assert text.isprintable()
    fact = [(EVIL, EVIL)]
    for html in (
        result._repr_html_(),
        html_card(EVIL, detail=EVIL, facts=fact, columns=[EVIL], rows=fact, notes=[EVIL, "\udcff"]),
    ):
        checked(html)
        assert "<script" not in html
        html.encode("utf-8")


def test_numbers_as_they_are_read() -> None:
    values = {
        "top1": 50.0,
        "top1_low": 40.0,
        "top1_high": 60.0,
        "loss": np.float64(1.23456),
        "images": 1234.0,
        "bleu": 37.25,
    }
    assert number_texts(values) == {"top1": "50.00 % (40.0…60.0)", "loss": "1.235", "images": "1,234", "bleu": "37.25"}
