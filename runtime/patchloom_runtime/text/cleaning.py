"""A sentence as it is used, for training and for whoever translates; without the rest of patchloom."""

import unicodedata

# Control characters become spaces; a byte order mark goes; '▁', which stands for a space in subwords, becomes '_'.
_CLEANED = {**dict.fromkeys([*range(32), *range(127, 160)], " "), 0xFEFF: None, 0x2581: "_"}
_CLEANED |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")  # halves of characters, which cannot be encoded


def clean(text: str) -> str:
    """A sentence as it is used: composed characters (NFC), no control characters, single spaces, none at its ends."""
    if not (text.isascii() and text.isprintable()):
        text = unicodedata.normalize("NFC", text.translate(_CLEANED))
    return " ".join(text.split())
