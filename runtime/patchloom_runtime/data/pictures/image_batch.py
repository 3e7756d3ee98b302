"""torch's tensors as pictures come in them: here there are none."""

import numpy as np


class Tensor(np.ndarray):
    """What no picture is an instance of."""


def array_of(values: Tensor, where: str) -> np.ndarray:
    """Never called: nothing is a tensor."""
    raise AssertionError(f"{where}: {type(values).__name__}")
