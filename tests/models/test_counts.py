"""Parameters and multiply-adds of every published network and ablation, as the papers' tables print them.

Exact parameters and the multiply-adds of matrix products are those of the authors' code (timm for Mixer); the printed
numbers of the papers stand beside them in millions and billions.
"""

import pytest
import torch

import patchloom
from patchloom.models.catalog import CATALOG, IMAGE_SIZE, TRANSLATION, VOCABULARY
from patchloom.models.cost import Cost
from patchloom.models.registry import family_of, list_models
from patchloom.models.seq2seq import VARIANTS, create_seq2seq

# name, options, resolution, parameters, multiply-adds (G), printed M, printed G
PUBLISHED = [
    # ResMLP, tables 1 and 3
    ("resmlp_s12", {}, 224, 15_350_872, 3.010, 15.4, 3.0),
    ("resmlp_s24", {}, 224, 30_020_680, 5.961, 30.0, 6.0),
    ("resmlp_s36", {}, 224, 44_690_488, 8.913, 45, 8.9),
    ("resmlp_b24", {}, 224, 115_736_776, 23.021, 115.7, 23.0),
    ("resmlp_s12_14", {}, 224, 15_607_912, 3.984, 15.6, 4.0),
    ("resmlp_s12_8", {}, 224, 22_051_624, 13.989, 22.1, 14.0),
    ("resmlp_b24_8", {}, 224, 129_138_280, 100.231, 129.1, 100.2),
    # MLP-Mixer, table 1 (which leaves the classifier out)
    ("mixer_s32", {}, 224, 19_104_624, 1.002, None, None),
    ("mixer_s16", {}, 224, 18_528_264, 3.777, None, None),
    ("mixer_b32", {}, 224, 60_293_428, 3.238, None, None),
    ("mixer_b16", {}, 224, 59_880_472, 12.602, None, 12.6),
    ("mixer_l32", {}, 224, 206_939_264, 11.253, None, None),
    ("mixer_l16", {}, 224, 208_196_168, 44.548, None, 44.6),
    ("mixer_h14", {}, 224, 432_350_952, 120.990, None, None),
    ("mixer_s32", {"num_classes": 0}, 224, 18_591_624, 1.002, 19, None),
    ("mixer_s16", {"num_classes": 0}, 224, 18_015_264, 3.777, 18, None),
    ("mixer_b32", {"num_classes": 0}, 224, 59_524_428, 3.238, 60, None),
    ("mixer_b16", {"num_classes": 0}, 224, 59_111_472, 12.602, 59, None),
    ("mixer_l32", {"num_classes": 0}, 224, 205_914_264, 11.253, 206, None),
    ("mixer_l16", {"num_classes": 0}, 224, 207_171_168, 44.548, 207, None),
    ("mixer_h14", {"num_classes": 0}, 224, 431_069_952, 120.990, 431, None),
    # sMLPNet, table 6
    ("smlpnet_t2", {}, 224, 19_175_584, 3.946, 19.2, 4.0),
    ("smlpnet_t", {}, 224, 24_123_584, 4.989, 24.1, 5.0),
    ("smlpnet_s", {}, 224, 48_558_136, 10.312, 48.6, 10.3),
    ("smlpnet_b", {}, 224, 65_880_408, 13.987, 65.9, 14.0),
    # DeiT, thesis table 3.1 (printed counts are cut off, not rounded)
    ("deit_ti", {}, 224, 5_717_416, 1.254, None, None),
    ("deit_s", {}, 224, 22_050_664, 4.599, 22, 4.6),
    ("deit_b", {}, 224, 86_567_656, 17.564, None, 17.6),
    ("deit_b", {}, 384, 86_859_496, 55.484, None, 55.5),
    ("deit_ti_distilled", {}, 224, 5_910_800, 1.261, 6, None),
    ("deit_s_distilled", {}, 224, 22_436_432, 4.624, 22, None),
    ("deit_b_distilled", {}, 224, 87_338_192, 17.657, 87, None),
    ("deit_b_distilled", {}, 384, 87_630_032, 55.591, None, 55.6),
    # DeiT III, table 6.7 and section 6.3
    ("deit3_t", {}, 224, 5_721_832, 1.254, 5.7, 1.3),
    ("deit3_s", {}, 224, 22_059_496, 4.599, None, 4.6),
    ("deit3_m", {}, 224, 38_849_512, 7.991, 38.8, 8.0),
    ("deit3_b", {}, 224, 86_585_320, 17.564, 86.6, 17.6),
    ("deit3_l", {}, 224, 304_374_760, 61.555, 304.4, 61.6),
    ("deit3_h", {}, 224, 632_126_440, 167.295, 632.1, 167.4),
    ("deit3_s", {}, 384, 22_205_416, 15.490, None, 15.5),
    ("deit3_b", {}, 384, 86_877_160, 55.484, 86.9, 55.5),
    ("deit3_l", {}, 384, 304_763_880, 191.066, 304.8, 191.2),
    ("deit3_h52", {}, 224, 1_025_726_440, 271.733, None, None),
    ("deit3_h26x2", {}, 224, 1_025_726_440, 271.733, None, None),
    ("deit3_s", {"depth": 36}, 224, 64_665_064, 13.680, None, None),
    ("deit3_s", {"depth": 36, "layer_scale": False}, 224, 64_637_416, 13.680, None, None),
    ("deit3_s", {"depth": 18, "parallel": 2}, 224, 64_665_064, 13.680, None, None),
    ("deit3_s", {"depth": 18, "parallel": 2, "layer_scale": False}, 224, 64_637_416, 13.680, None, None),
    ("deit3_b", {"depth": 18, "parallel": 2}, 224, 256_731_112, 52.459, None, None),
    ("deit3_b", {"depth": 18, "parallel": 2, "layer_scale": False}, 224, 256_675_816, 52.459, None, None),
    ("deit3_b", {"depth": 36}, 224, 256_731_112, 52.459, None, None),
    ("deit3_b", {"depth": 36, "layer_scale": False}, 224, 256_675_816, 52.459, None, None),
    ("deit3_h", {"depth": 40, "dim": 1408}, 224, 955_030_504, 252.210, None, None),
    ("deit3_h", {"depth": 48, "dim": 1664}, 224, 1_599_158_248, 420.688, None, None),
    # CaiT, table 3.15 (at 384 it repeats the parameters of 224) and 3.19
    ("cait_xxs24", {}, 224, 11_956_264, 2.523, 12.0, 2.5),
    ("cait_xxs24", {}, 384, 12_029_224, 9.599, 12.0, None),
    ("cait_xxs36", {}, 224, 17_299_720, 3.756, 17.3, 3.8),
    ("cait_xxs36", {}, 384, 17_372_680, 14.313, None, None),
    ("cait_xs24", {}, 224, 26_560_648, 5.390, 26.6, 5.4),
    ("cait_xs24", {}, 384, 26_670_088, 19.241, None, 19.3),
    ("cait_xs36", {}, 224, 38_557_432, 8.030, 38.6, 8.1),
    ("cait_xs36", {}, 384, 38_666_872, 28.700, None, 28.8),
    ("cait_s24", {}, 224, 46_916_200, 9.327, 46.9, None),
    ("cait_s24", {}, 384, 47_062_120, 32.110, None, 32.2),
    ("cait_s36", {}, 224, 68_220_712, 13.902, 68.2, 13.9),
    ("cait_s36", {}, 384, 68_366_632, 47.908, None, 48.0),
    ("cait_s48", {}, 224, 89_525_224, 18.477, 89.5, None),
    ("cait_s48", {}, 384, 89_671_144, 63.706, None, 63.8),
    ("cait_m24", {}, 224, 185_850_088, 35.776, 185.9, None),
    ("cait_m24", {}, 384, 186_141_928, 115.868, None, 116.1),
    ("cait_m36", {}, 224, 270_929_512, 53.367, 270.9, None),
    ("cait_m36", {}, 384, 271_221_352, 172.944, None, 173.3),
    ("cait_m36", {}, 448, 271_381_096, 247.413, None, 247.8),
    ("cait_m48", {}, 224, 356_008_936, 70.959, 356, None),
    ("cait_m48", {}, 384, 356_300_776, 230.020, None, None),
    ("cait_m48", {}, 448, 356_460_520, 329.108, None, 329.6),
    ("cait_b12", {}, 224, 100_770_664, 18.185, None, 18.2),
    # PatchConvNet, tables 5.1, 5.2 and 5.8
    ("patchconvnet_s20", {}, 224, 10_235_896, 1.637, None, None),
    ("patchconvnet_s36", {}, 224, 16_233_976, 2.574, None, None),
    ("patchconvnet_s60", {}, 224, 25_231_096, 3.979, 25.2, 4.0),
    ("patchconvnet_s60", {}, 288, 25_231_096, 6.574, None, 6.6),
    ("patchconvnet_s60", {}, 320, 25_231_096, 8.115, None, 8.2),
    ("patchconvnet_s60", {}, 384, 25_231_096, 11.683, None, 11.8),
    ("patchconvnet_s60", {}, 512, 25_231_096, 20.764, None, 20.9),
    ("patchconvnet_s120", {}, 224, 47_723_896, 7.493, 47.7, 7.5),
    ("patchconvnet_b36", {}, 224, 63_699_976, 10.214, None, None),
    ("patchconvnet_b60", {}, 224, 99_388_936, 15.803, 99.4, 15.8),
    ("patchconvnet_b60", {}, 288, 99_388_936, 26.107, None, 26.1),
    ("patchconvnet_b60", {}, 384, 99_388_936, 46.394, None, 46.5),
    ("patchconvnet_b120", {}, 224, 188_611_336, 29.775, 188.6, 29.9),
    ("patchconvnet_b120", {}, 288, 188_611_336, 49.192, None, 49.3),
    ("patchconvnet_b120", {}, 320, 188_611_336, 60.721, None, 60.9),
    ("patchconvnet_b120", {}, 384, 188_611_336, 87.419, None, 87.7),
    ("patchconvnet_l60", {}, 224, 176_009_576, 28.043, None, 28.1),
    ("patchconvnet_l60", {}, 288, 176_009_576, 46.329, None, 46.4),
    ("patchconvnet_l60", {}, 384, 176_009_576, 82.329, None, 82.5),
    ("patchconvnet_l120", {}, 224, 334_294_376, 52.846, None, 53.0),
    ("patchconvnet_l120", {}, 288, 334_294_376, 87.308, None, 87.5),
    ("patchconvnet_l120", {}, 384, 334_294_376, 155.157, None, 155.5),
    ("patchconvnet_s60", {"class_tokens": "per_class"}, 224, 25_614_712, 5.308, 25.6, 5.3),
    # Attention pooling on ResNet-50, section 5.3.4: its 25.6 M lose no classifier and gain one block of 2048 channels
    ("resnet50_attention_pool", {}, 224, 67_534_888, 4.542, None, 4.6),
]

_FOUR = (1, 2, 3, 4)
# The papers' ablations: counts computed from the construction that gives the printed ones
ABLATIONS = [
    ("resmlp_s12", {"communication": "none"}, 14.87, 2.83, 14.9, 2.8),
    ("resmlp_s12", {"communication": "mlp"}, 18.59, 4.25, 18.6, 4.3),
    ("resmlp_s12", {"communication": "conv"}, 30.82, 5.95, 30.8, 6.0),
    ("resmlp_s12", {"communication": "depthwise"}, 14.93, 2.84, 14.9, 2.8),
    ("resmlp_s12", {"communication": "separable"}, 16.71, 3.19, 16.7, 3.2),
    ("resmlp_s12", {"pool": "class_mlp"}, 17.72, 3.01, 17.7, 3.0),
    ("resmlp_s12", {"norm": "layer"}, 15.35, 3.01, 15.4, 3.0),
    ("smlpnet_t2", {"local": False}, 19.10, 3.92, 19.1, 3.9),
    ("smlpnet_t2", {"dim": 112, "global_stages": (), "instead_of_global": "nothing"}, 22.54, 4.38, 22.5, 4.4),
    ("smlpnet_b", {"global_stages": _FOUR[1:]}, 65.79, 13.68, 65.8, 13.7),
    ("smlpnet_b", {"global_stages": _FOUR[2:]}, 64.29, 12.42, 64.3, 12.4),
    ("smlpnet_b", {"global_stages": _FOUR[3:]}, 49.93, 9.54, 49.9, 9.5),
    ("smlpnet_b", {"global_stages": ()}, 45.13, 9.31, 45.1, 9.3),
    ("smlpnet_s", {"fusion": "sum"}, 33.24, 7.02, 33.2, 7.0),
    ("smlpnet_s", {"fusion": "weighted"}, 33.28, 7.02, 33.3, 7.0),
    ("smlpnet_t2", {"global_stages": (), "token_mlp": (2, 3, 4)}, 22.67, 4.17, 22.7, 4.2),
    (
        "smlpnet_t2",
        {"depths": (26,), "dim": 512, "patch_size": 16, "token_mlp": (1,)},
        30.42,
        6.47,
        30.4,
        6.5,
    ),
    # Class-token ablations of table 3.13, printed without decimals for parameters
    ("cait_s24", {"depth": 9, "class_depth": 3, "heads": 6, "talking_heads": False}, None, None, 22, 3.6),
    ("cait_s24", {"depth": 12, "class_depth": 2, "heads": 6, "talking_heads": False}, None, None, 26, 4.7),
]


def count(name: str, options: dict, resolution: int) -> Cost:
    with torch.device("meta"):
        network = patchloom.create_model(name, image_size=resolution, **options)
    return patchloom.cost(network)


@pytest.mark.parametrize(("name", "options", "resolution", "parameters", "gigas", "print_m", "print_g"), PUBLISHED)
def test_published(name, options, resolution, parameters, gigas, print_m, print_g) -> None:
    cost = count(name, options, resolution)
    assert cost.parameters == parameters
    assert cost.multiply_adds / 1e9 == pytest.approx(gigas, rel=0.005)
    if not options and resolution == IMAGE_SIZE:
        assert CATALOG[name] == (family_of(name).__name__, cost.parameters, cost.multiply_adds)
    if print_m is not None:
        assert abs(cost.parameters / 1e6 - print_m) <= (0.05 if print_m % 1 else 0.5) + 1e-9
    if print_g is not None:
        # Printed to a tenth, with up to 0.6 % for norms and extra tokens in the count.
        assert cost.multiply_adds / 1e9 == pytest.approx(print_g, abs=0.05 + 0.006 * print_g)


@pytest.mark.parametrize(("name", "options", "megas", "gigas", "print_m", "print_g"), ABLATIONS)
def test_ablation(name, options, megas, gigas, print_m, print_g) -> None:
    cost = count(name, options, 224)
    if megas is not None:
        assert round(cost.parameters / 1e6, 2) == megas
        assert cost.multiply_adds / 1e9 == pytest.approx(gigas, abs=0.006)
    assert abs(cost.parameters / 1e6 - print_m) <= (0.05 if isinstance(print_m, float) else 0.5)
    assert cost.multiply_adds / 1e9 == pytest.approx(print_g, abs=0.06)


def test_every_registered_network_is_in_the_table() -> None:
    assert set(list_models()) == {row[0] for row in PUBLISHED}


def test_the_catalog_has_the_networks_of_the_registry() -> None:
    assert list(CATALOG) == list_models()
    assert list(TRANSLATION) == list(VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_catalog_counts_what_translates(name) -> None:
    with torch.device("meta"):
        network = create_seq2seq(name, vocabulary=VOCABULARY)
    assert TRANSLATION[name] == sum(parameter.numel() for parameter in network.parameters())
