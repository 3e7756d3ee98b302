"""Text cleaning, and subword vocabularies: one for both languages, byte-pair encoding by sentencepiece.

A character that the vocabulary lacks is spelled in its UTF-8 bytes, which are 256 of the pieces, so nothing is lost:
`decode(encode(text)) == clean(text)`. Training uses one thread, so that the same lines in the same order give the same
bytes.
"""

import io
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from patchloom_runtime.errors import CheckpointError, DataError, UsageError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3  # in every vocabulary
FEWEST_PIECES = 4 + 256  # the special tokens and the bytes
CHARACTER_COVERAGE = 0.9999  # rarer characters are spelled in bytes instead of taking a piece
_LONGEST_LINE_BYTES = 1 << 24  # sentencepiece skips longer lines, by default from 4,192 bytes on
_LINES_AT_ONCE = 10_000

# Control characters become spaces, a byte order mark is removed, '▁' (a space in subwords) becomes '_'.
_CLEANED = {**dict.fromkeys([*range(32), *range(127, 160)], " "), 0xFEFF: None, 0x2581: "_"}
_CLEANED |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")  # surrogates, which cannot be encoded


def clean(text: str) -> str:
    """Normalize a sentence: composed characters (NFC), no control characters, single spaces, none at the ends."""
    if not (text.isascii() and text.isprintable()):
        text = unicodedata.normalize("NFC", text.translate(_CLEANED))
    return " ".join(text.split())


class Vocabulary:
    """A mapping between text and subword numbers. `encode` never returns pad 0, bos 1, eos 2 or unknown 3."""

    def __init__(self, processor: "SentencePieceProcessor", note: str = "") -> None:
        self._processor = processor
        self.note = note  # if the text did not allow the requested size

    def __len__(self) -> int:
        return self._processor.get_piece_size()

    @classmethod
    def train(cls, lines: Iterable[str], size: int) -> "Vocabulary":
        """Learn `size` pieces from sentences of all languages together, or fewer, with a note, if there are no more.

        All lines are held in memory: pass a sample of a large text.
        """
        sentencepiece = _sentencepiece()
        if size < FEWEST_PIECES:
            raise UsageError(
                f"A vocabulary has at least {FEWEST_PIECES} pieces, of which 256 are bytes; got a size of {size}"
            )
        text = [sentence for line in lines if (sentence := clean(line))]
        if not text:
            raise DataError("The text to learn a vocabulary from has only empty lines")
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(text),
                model_writer=model,
                model_type="bpe",
                vocab_size=size,
                hard_vocab_limit=False,
                byte_fallback=True,
                character_coverage=CHARACTER_COVERAGE,
                normalization_rule_name="identity",
                max_sentence_length=_LONGEST_LINE_BYTES,
                pad_id=PAD,
                bos_id=BOS,
                eos_id=EOS,
                unk_id=UNKNOWN,
                num_threads=1,
                minloglevel=2,
            )
        except RuntimeError as error:
            if "required_chars" not in str(error):
                raise
            characters = len(set("".join(text)))
            raise UsageError(
                f"A vocabulary of {size} pieces is too small for this text: it has {characters} characters, "
                f"and 260 pieces are reserved. Use at least {FEWEST_PIECES + characters + 1}."
            ) from error
        learned = cls.from_bytes(model.getvalue())
        if len(learned) < size:
            learned.note = f"the text has only {len(learned):,} subwords, fewer than the requested {size:,}"
        return learned

    def encode(self, text: str) -> list[int]:
        """Return the subword numbers of a sentence, without bos and eos."""
        return self._processor.encode(clean(text))

    def encode_all(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Encode many sentences on all cores."""
        rest = iter(texts)
        while batch := [clean(text) for text in islice(rest, _LINES_AT_ONCE)]:
            yield from self._processor.encode(batch)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text. pad, bos and eos are skipped, unknown is ' ⁇ ', invalid UTF-8 is '\\ufffd'."""
        return self._processor.decode(list(ids))

    def piece(self, number: int) -> str:
        """Return the text of one subword, with '▁' for a space."""
        return self._processor.id_to_piece(number)

    def to_bytes(self) -> bytes:
        """Return the model in sentencepiece's own file format."""
        return self._processor.serialized_model_proto()

    @classmethod
    def from_bytes(cls, model: bytes) -> "Vocabulary":
        """Load a sentencepiece model. Raises CheckpointError if it is damaged or has other special tokens."""
        sentencepiece = _sentencepiece()
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            processor.id_to_piece(list(range(len(processor))))  # fails now if a piece is not valid text
        except (RuntimeError, UnicodeDecodeError) as error:
            raise CheckpointError(
                "vocabulary.model is not a sentencepiece model, or is damaged; restore the file"
            ) from error
        special = (processor.pad_id(), processor.bos_id(), processor.eos_id(), processor.unk_id())
        if special != (PAD, BOS, EOS, UNKNOWN):
            raise CheckpointError(
                f"The vocabulary has pad, bos, eos and unknown at {special}; expected {(PAD, BOS, EOS, UNKNOWN)}"
            )
        return cls(processor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def __reduce__(self) -> tuple[Any, ...]:
        return Vocabulary.from_bytes, (self.to_bytes(),)


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise UsageError(
            "subwords need sentencepiece, which is not installed: pip install sentencepiece, or 'patchloom[translate]'"
        ) from None
    return sentencepiece
