"""One bar per row, as HTML: long names wrap instead of being cut, and letters keep their size on a phone."""

import math
from collections.abc import Sequence

from markupsafe import Markup


def bars(rows: Sequence[tuple[str, float, str]], *, high: float = 100.0) -> Markup:
    """One bar per row of (label, value, text after the bar); a value that is not finite has no bar."""
    row = Markup('<span>{}</span><i><b style="width:{:.4g}%"></b></i><span>{}</span>')
    parts = [row.format(name, 100 * value / high if math.isfinite(value) else 0, text) for name, value, text in rows]
    return Markup('<div class="bars">{}</div>').format(Markup("").join(parts))
