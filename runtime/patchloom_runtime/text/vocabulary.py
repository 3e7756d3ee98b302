"""Subwords: one vocabulary for both languages, byte-pair encoding by sentencepiece.

A character that the vocabulary does not have is spelled in its UTF-8 bytes, which are 256 of the pieces, so nothing is
lost: `decode(encode(text)) == clean(text)`. The same lines in the same order give the same bytes, hence one thread.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from patchloom_runtime.errors import CheckpointError, DataError, UsageError
from patchloom_runtime.text.cleaning import clean
from patchloom_runtime.text.special_tokens import BOS, EOS, PAD, UNKNOWN

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

# pad, bos, eos, unknown and the bytes
FEWEST_PIECES = 4 + 256
# Rarer characters, one of 10,000, are spelled in bytes instead of taking a piece.
CHARACTER_COVERAGE = 0.9999
# sentencepiece leaves longer lines out, by default from 4,192 bytes on.
_LONGEST_LINE_BYTES = 1 << 24
_LINES_AT_ONCE = 10_000


class Vocabulary:
    """Text ↔ numbers of subwords; pad 0, bos 1, eos 2, unknown 3, none of which `encode` gives."""

    def __init__(self, processor: "SentencePieceProcessor", note: str = "") -> None:
        self._processor = processor
        self.note = note  # on a size that the text did not allow

    def __len__(self) -> int:
        return self._processor.get_piece_size()

    @classmethod
    def train(cls, lines: Iterable[str], size: int) -> "Vocabulary":
        """Learn `size` pieces from sentences of all languages together; fewer, with a note, where these have no more.

        The lines are kept in memory while it learns: of a large text, give a part.
        """
        sentencepiece = _sentencepiece()
        if size < FEWEST_PIECES:
            raise UsageError(
                f"A vocabulary of {size} pieces; expected at least {FEWEST_PIECES}, of which 256 are bytes"
            )
        text = [sentence for line in lines if (sentence := clean(line))]
        if not text:
            raise DataError("The text to learn a vocabulary from has no sentence that is not empty")
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
                f"and 260 pieces are taken before them. Give at least {FEWEST_PIECES + characters + 1}."
            ) from error
        learned = cls.from_bytes(model.getvalue())
        if len(learned) < size:
            learned.note = f"the text has no more than {len(learned):,} subwords, {size:,} were asked for"
        return learned

    def encode(self, text: str) -> list[int]:
        """Its subwords, without bos and eos; an empty sentence has none."""
        return self._processor.encode(clean(text))

    def encode_all(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """The same for many, on all cores."""
        rest = iter(texts)
        while some := [clean(text) for text in islice(rest, _LINES_AT_ONCE)]:
            yield from self._processor.encode(some)

    def decode(self, ids: Sequence[int]) -> str:
        """The text; pad, bos and eos say nothing, unknown is ' ⁇ ', bytes that are no UTF-8 are '\\ufffd'."""
        return self._processor.decode(list(ids))

    def piece(self, number: int) -> str:
        """The text of one subword; '▁' in it stands for a space."""
        return self._processor.id_to_piece(number)

    def to_bytes(self) -> bytes:
        """sentencepiece's own file."""
        return self._processor.serialized_model_proto()

    @classmethod
    def from_bytes(cls, model: bytes) -> "Vocabulary":
        """What `to_bytes` gave; another file of sentencepiece's is taken if its numbers are ours."""
        sentencepiece = _sentencepiece()
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            processor.id_to_piece(list(range(len(processor))))  # each is text: one that is not would be found later
        except (RuntimeError, UnicodeDecodeError) as error:
            raise CheckpointError(
                "vocabulary.model is no vocabulary of sentencepiece, or is damaged; restore the file"
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
            "subwords need sentencepiece; pip install 'patchloom[translate]', or sentencepiece alone"
        ) from None
    return sentencepiece
