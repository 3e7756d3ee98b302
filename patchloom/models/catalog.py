"""The published networks by name, with their costs, as constants.

Unlike `registry`, which builds the networks, this module does not import torch, which takes seconds.
`tests/models/test_counts.py` compares the constants with the networks.
"""

from typing import NamedTuple

IMAGE_SIZE = 224  # pixels, with 1,000 classes
VOCABULARY = 32_768  # words of the translation networks


class CatalogEntry(NamedTuple):
    """Family and cost of a network."""

    family: str
    parameters: int
    multiply_adds: int


# In the order of `registry.list_models`.
CATALOG: dict[str, CatalogEntry] = {
    "resmlp_s12": CatalogEntry("ResMLP", 15_350_872, 3_009_739_776),
    "resmlp_s24": CatalogEntry("ResMLP", 30_020_680, 5_961_292_800),
    "resmlp_s36": CatalogEntry("ResMLP", 44_690_488, 8_912_845_824),
    "resmlp_b24": CatalogEntry("ResMLP", 115_736_776, 23_020_713_984),
    "resmlp_s12_14": CatalogEntry("ResMLP", 15_607_912, 3_984_055_296),
    "resmlp_s12_8": CatalogEntry("ResMLP", 22_051_624, 13_988_649_984),
    "resmlp_b24_8": CatalogEntry("ResMLP", 129_138_280, 100_230_739_968),
    "mixer_s32": CatalogEntry("Mixer", 19_104_624, 1_002_426_368),
    "mixer_s16": CatalogEntry("Mixer", 18_528_264, 3_776_958_464),
    "mixer_b32": CatalogEntry("Mixer", 60_293_428, 3_237_722_112),
    "mixer_b16": CatalogEntry("Mixer", 59_880_472, 12_601_767_936),
    "mixer_l32": CatalogEntry("Mixer", 206_939_264, 11_253_293_056),
    "mixer_l16": CatalogEntry("Mixer", 208_196_168, 44_547_678_208),
    "mixer_h14": CatalogEntry("Mixer", 432_350_952, 120_989_911_040),
    "smlpnet_t2": CatalogEntry("SMLPNet", 19_175_584, 3_945_790_720),
    "smlpnet_t": CatalogEntry("SMLPNet", 24_123_584, 4_989_451_520),
    "smlpnet_s": CatalogEntry("SMLPNet", 48_558_136, 10_312_161_792),
    "smlpnet_b": CatalogEntry("SMLPNet", 65_880_408, 13_986_515_200),
    "deit_ti": CatalogEntry("ViT", 5_717_416, 1_253_683_200),
    "deit_s": CatalogEntry("ViT", 22_050_664, 4_598_882_304),
    "deit_b": CatalogEntry("ViT", 86_567_656, 17_563_828_224),
    "deit_ti_distilled": CatalogEntry("ViT", 5_910_800, 1_261_003_776),
    "deit_s_distilled": CatalogEntry("ViT", 22_436_432, 4_624_140_288),
    "deit_b_distilled": CatalogEntry("ViT", 87_338_192, 17_656_811_520),
    "deit3_t": CatalogEntry("ViT", 5_721_832, 1_253_683_200),
    "deit3_s": CatalogEntry("ViT", 22_059_496, 4_598_882_304),
    "deit3_m": CatalogEntry("ViT", 38_849_512, 7_990_968_320),
    "deit3_b": CatalogEntry("ViT", 86_585_320, 17_563_828_224),
    "deit3_l": CatalogEntry("ViT", 304_374_760, 61_554_712_576),
    "deit3_h": CatalogEntry("ViT", 632_126_440, 167_295_109_120),
    "deit3_h52": CatalogEntry("ViT", 1_025_726_440, 271_733_329_920),
    "deit3_h26x2": CatalogEntry("ViT", 1_025_726_440, 271_733_329_920),
    "cait_xxs24": CatalogEntry("CaiT", 11_956_264, 2_523_475_200),
    "cait_xxs36": CatalogEntry("CaiT", 17_299_720, 3_755_697_408),
    "cait_xs24": CatalogEntry("CaiT", 26_560_648, 5_390_354_304),
    "cait_xs36": CatalogEntry("CaiT", 38_557_432, 8_030_088_576),
    "cait_s24": CatalogEntry("CaiT", 46_916_200, 9_327_327_744),
    "cait_s36": CatalogEntry("CaiT", 68_220_712, 13_902_174_720),
    "cait_s48": CatalogEntry("CaiT", 89_525_224, 18_477_021_696),
    "cait_m24": CatalogEntry("CaiT", 185_850_088, 35_776_164_864),
    "cait_m36": CatalogEntry("CaiT", 270_929_512, 53_367_469_056),
    "cait_m48": CatalogEntry("CaiT", 356_008_936, 70_958_773_248),
    "cait_b12": CatalogEntry("CaiT", 100_770_664, 18_184_860_672),
    "patchconvnet_s20": CatalogEntry("PatchConvNet", 10_235_896, 1_637_315_328),
    "patchconvnet_s36": CatalogEntry("PatchConvNet", 16_233_976, 2_574_177_024),
    "patchconvnet_s60": CatalogEntry("PatchConvNet", 25_231_096, 3_979_469_568),
    "patchconvnet_s120": CatalogEntry("PatchConvNet", 47_723_896, 7_492_700_928),
    "patchconvnet_b36": CatalogEntry("PatchConvNet", 63_699_976, 10_214_352_384),
    "patchconvnet_b60": CatalogEntry("PatchConvNet", 99_388_936, 15_803_008_512),
    "patchconvnet_b120": CatalogEntry("PatchConvNet", 188_611_336, 29_774_648_832),
    "patchconvnet_l60": CatalogEntry("PatchConvNet", 176_009_576, 28_043_184_128),
    "patchconvnet_l120": CatalogEntry("PatchConvNet", 334_294_376, 52_845_529_088),
    "resnet50_attention_pool": CatalogEntry("PooledConvNet", 67_534_888, 4_542_373_888),
}

TRANSLATION: dict[str, int] = {
    "translation_resmlp_6": 49_115_136,
    "translation_resmlp_12": 81_451_008,
    "translation_transformer_base": 60_917_760,
}


def human(count: float) -> str:
    """Format a count as the papers do: 28.6 k, 15.4 M, 3.01 G, 23.0 G; beyond, as 1.2e+19."""
    if count < 1e5:
        return f"{count / 1e3:.1f} k"
    if count < 1e9:
        return f"{count / 1e6:.1f} M"
    if count < 1e12:
        return f"{count / 1e9:.2f} G" if count < 1e10 else f"{count / 1e9:.1f} G"
    return f"{count:.2g}"
