"""Numbers that every vocabulary of subwords gives to what is no text."""

PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3
