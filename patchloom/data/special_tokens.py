"""Ids of the tokens that are no words; every vocabulary begins with them."""

PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3
