"""From values to pixels, and the values an axis names."""

import math
from typing import NamedTuple

WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 28, 36  # margins of a line chart


class Axis(NamedTuple):
    """Values from `low` to `high` laid on pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


class LogAxis(Axis):
    """The same with equal steps for equal factors; values are above 0."""

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        return Axis(math.log(self.low), math.log(self.high), self.start, self.end)(math.log(value))


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` steps of 1, 2 or 5 times a power of ten, from at or below `low` to at or above `high`."""
    apart = high - low if high - low > 1e-9 * max(abs(low), abs(high)) else 0.0  # rounding apart
    rough = (apart or abs(high) or 1.0) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if first == last:  # a single value that is a tick: the axis ends there, as 100 % does, or begins at 0
        first, last = (first - 1, last) if high > 0 else (first, last + 1)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]
