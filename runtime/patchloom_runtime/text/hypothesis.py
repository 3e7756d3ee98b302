"""What a search for translations finds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hypothesis:
    """A translation that was found."""

    tokens: tuple[int, ...]  # without BOS and EOS
    score: float  # log_probability / length**length_penalty, where the length counts EOS
    log_probability: float  # natural, of the tokens and EOS
