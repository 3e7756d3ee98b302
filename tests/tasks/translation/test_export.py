"""A translator as two graphs and a search in numpy writes what the run writes; its artifact is a translator."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import patchloom
from patchloom.exporters.artifact import Exported
from patchloom.exporters.formats import format_named
from patchloom.models.beam_search import beam_search
from patchloom.models.seq2seq import create_seq2seq
from patchloom.tasks.export import export
from patchloom.tasks.translation.graph import state_size, translator_parts
from patchloom_runtime.artifacts.translator import STEP, BeamSearch
from patchloom_runtime.engines.engine import ENGINES, MODEL
from patchloom_runtime.errors import UsageError
from patchloom_runtime.text.vocabulary import EOS, PAD
from tests.export.test_export import needs_onnx

pytest.importorskip("sentencepiece", reason="subwords need sentencepiece")
pytest.importorskip("sacrebleu", reason="BLEU needs sacrebleu")
ROOT = Path(__file__).parents[3]
RUN = ROOT / "tests" / "golden" / "translator"
LINES = ["one hundred and two", "", "seven", "nine hundred and ninety-nine thousand and twelve"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    needs_onnx()
    return export(str(RUN), str(tmp_path_factory.mktemp("text") / "artifact"), data="numbers:count=150", images=12)


def test_an_artifact_is_a_translator(exported: Exported) -> None:
    run, file = exported.rows
    assert (exported.measure, exported.compared, exported.images) == ("BLEU", "sentences", 12)
    assert (file.agreement, file.accuracy) == (100.0, run.accuracy)
    artifact, translator = patchloom.load(exported.folder), patchloom.load(RUN, device="cpu")
    for options in ({"beams": 1}, {"beams": 4, "n_best": 3}, {"beams": 2, "length_penalty": 0.0, "batch": 1}):
        results, wanted = (list(model.translate(LINES, **options)) for model in (artifact, translator))
        assert [[one.text for one in line] for line in results] == [[one.text for one in line] for line in wanted]
        assert np.allclose([line[0].score for line in results], [line[0].score for line in wanted], atol=1e-4)
    assert f"{translator.source} → {translator.target}" in repr(artifact)
    with pytest.raises(UsageError) as error:
        list(artifact.translate(["one"], beams=1, n_best=2))
    assert "n_best" in str(error.value)
    assert "2" in str(error.value)


def test_the_runtime_translates_without_torch(exported: Exported, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'runtime')!r})\n"
        "import patchloom_runtime\n"
        f"model = patchloom_runtime.load({str(exported.folder)!r})\n"
        "print(ascii(next(model.translate(['seven']))[0].text))\n"
        "print({'torch', 'patchloom', 'pyarrow'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    expected = next(patchloom.load(RUN, device="cpu").translate(["seven"]))[0].text
    assert done.stdout.splitlines() == [ascii(expected), "set()"]


@pytest.mark.slow
@pytest.mark.parametrize("to", ENGINES)
@pytest.mark.parametrize("name", ["translation_resmlp_6", "translation_transformer_base"])
def test_the_graphs_search_as_the_network_does(name: str, to: str, tmp_path: Path) -> None:
    form = format_named(to)
    for package in form.packages:
        pytest.importorskip(package, reason=f"{package} is not installed: {form.install}")
    torch.manual_seed(0)
    network = create_seq2seq(name, vocabulary=50, max_length=24, dim=16, hidden=32, layers=2, heads=2).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    for part in translator_parts(network):
        form.write(part, tmp_path)
    graphs = {part: form.open(tmp_path, 1, part) for part in (MODEL, STEP)}
    pieces = [[5, 9, 17, 30], [8], list(range(10, 33))]
    width = max(map(len, pieces)) + 1
    source = torch.tensor([[*ids, EOS] + [PAD] * (width - 1 - len(ids)) for ids in pieces])
    for beams in (1, 3):
        how = {"max_length_a": 2.0, "max_length_b": 50, "stop_early": False}
        wanted = beam_search(network, source, beams=beams, length_penalty=0.6, n_best=beams, **how)
        results = BeamSearch(graphs, 24, state_size(network), beams, 0.6).of_pieces(pieces, beams)
        assert [[one.tokens for one in each] for each in results] == [[one.tokens for one in each] for each in wanted]
