"""Translation: ResMLP's encoder-decoder and its Transformer twin (ResMLP 3.6; thesis 4.2, 4.3.5).

`optim.batch_size` counts tokens. For WMT'14 see docs/translation.md. What the papers do not state is taken from Ott et
al. 2018, whom they follow.
"""

from __future__ import annotations

from patchloom.recipes.parts import ModelPart, ObjectivePart, OptimPart, SchedulePart, TextPart
from patchloom.recipes.registry import based_on, recipe
from patchloom.recipes.schema import Recipe


@recipe
def translation_resmlp(model: str = "translation_resmlp_6") -> Recipe:
    """WMT'14, tokenized BLEU on newstest2014: En-De 26.4 with 6 layers, 26.8 with 12; En-Fr 40.3 and 40.6.

    The dropout is that of En-De; for En-Fr it is 0.1 and the vocabulary 40,000. Adagrad's rate decays by itself, so the
    schedule is constant after warm-up.
    """
    return Recipe(
        name="translation_resmlp",
        source="ResMLP 3.6; dropout of En-De (En-Fr 0.1); batch, averaging and search as Ott et al. 2018; epochs ours.",
        model=ModelPart(name=model, dropout=0.15),
        objective=ObjectivePart(method="translation", smoothing=0.1),
        text=TextPart(max_ratio=1.5),
        optim=OptimPart(name="adagrad", lr=0.2, batch_size=28_672),
        schedule=SchedulePart(epochs=40, warmup_steps=32_000, decay="constant"),
    )


@recipe
def translation_transformer(model: str = "translation_transformer_base") -> Recipe:
    """WMT'14, tokenized BLEU on newstest2014: En-De 27.3, En-Fr 38.1 (Vaswani et al. 2017, base)."""
    return based_on(
        translation_resmlp(model),
        source="Vaswani et al. 2017 (dropout, Adam) at the rate of Ott et al. 2018; the rest as translation_resmlp.",
        model={"dropout": 0.1},
        optim={"name": "adam", "lr": 5e-4, "betas": (0.9, 0.98)},
        schedule={"warmup_steps": 4000, "warmup_lr": 1e-7, "decay": "inverse_sqrt"},
    )


@recipe
def translation_small(model: str = "translation_resmlp_6") -> Recipe:
    """Tens of thousands of pairs, such as Multi30k; the same size, steps and rate for ResMLP and the Transformer."""
    return based_on(
        translation_transformer(model),
        source="patchloom's own: half the width and layers, more dropout, short warm-up; measured in docs/results.md.",
        model={"dropout": 0.3, "options": {"dim": 256, "hidden": 512, "layers": 3, "heads": 4}},
        text=TextPart(vocabulary=8000, max_length=100, averaged_epochs=5),
        optim={"lr": 2e-3, "batch_size": 8192, "clip_norm": 1.0},
        schedule={"epochs": 60, "warmup_steps": 400, "warmup_lr": 0.0},
    )


@recipe
def translation_tiny(model: str = "translation_resmlp_6") -> Recipe:
    """A few thousand short sentences on a CPU: the built-in `numbers` in a minute or two."""
    return based_on(
        translation_small(model),
        source="patchloom's own: the built-in numbers on a CPU; measured in docs/translation.md.",
        model={"dropout": 0.0, "options": {"dim": 128, "hidden": 256, "layers": 2, "heads": 4}},
        text={"vocabulary": 400, "max_length": 64, "averaged_epochs": 3},
        optim={"lr": 4e-3, "batch_size": 2048},
        schedule={"epochs": 32, "warmup_steps": 100},
    )
