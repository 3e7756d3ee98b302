"""Drawings of networks from their modules."""

from xml.etree import ElementTree

import pytest

from patchloom.report.charts.diagram import diagram_parts, network_diagram
from patchloom.report.charts.svg import svg_file
from tests.networks import ONE_OF_EACH, small
from tests.reliability.commands import command


def lines(name: str, **options) -> list[str]:
    parts = diagram_parts(small(name, **options))
    return [text for part in parts for text in (part.title, *(line for _, line in part.lines))]


def test_equal_blocks_are_drawn_once_and_branches_as_sentences() -> None:
    drawn = lines("resmlp_s12", depth=3)
    assert "3 × Block" in drawn
    assert "tokens: x + scale · TokenLinear(Affine(x))" in drawn
    assert drawn[-1] == "5 classes"
    assert "tokens: LayerNorm(x + Attention(x))" in lines("deit_s", norm_place="post")
    assert "tokens: x + scale · Attention(x)" in lines("cait_xxs24", norm_place="none", talking_heads=False)


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_every_family_is_drawn_whole(name: str) -> None:
    network = small(name)
    drawn = ElementTree.fromstring(svg_file(network_diagram(network)))
    texts = [element.text or "" for element in drawn.iter() if element.tag.endswith("text")]
    for child, module in network.named_children():
        assert any(text.startswith(f"{child}: ") for text in texts) == any(True for _ in module.parameters())


def test_the_command_writes_one_drawing(tmp_path, monkeypatch, capsys) -> None:
    file = tmp_path / "network.svg"
    assert command(("models", "deit_ti", "--svg", str(file)), monkeypatch, capsys).code == 0
    assert "12 × Block" in file.read_text("utf-8")
    several = command(("models", "deit_*", "--svg", str(file)), monkeypatch, capsys)
    assert several.code == 2
    assert "--svg" in several.errors
