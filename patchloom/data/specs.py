"""How users name data: one path, URL or built-in name, or several of them."""

import os
import shlex
from collections.abc import Sequence

from patchloom_runtime.errors import UsageError

Spec = str | os.PathLike[str]


def split_specs(spec: Spec | Sequence[Spec]) -> list[str]:
    """Return the single specs of a list, or of a string that quotes several as a shell would: 'cats/ dogs/'.

    A path that exists, or a name, is one spec. A string is split only if all of its parts exist.
    """
    if not isinstance(spec, str | os.PathLike):
        specs = [os.fspath(one) for one in spec]
        if not specs:
            raise UsageError("no data were given; expected a folder, a file or a name")
        return specs
    whole = os.fspath(spec)
    if " " not in whole or os.path.exists(os.path.expanduser(whole)):
        return [whole]
    try:
        parts = shlex.split(whole)
    except ValueError:
        return [whole]
    return parts if all(os.path.exists(os.path.expanduser(part)) for part in parts) else [whole]


def join_specs(specs: Sequence[Spec]) -> str:
    """Return several specs as the string that `split_specs` splits; a single one stays as it is."""
    names = [os.fspath(spec) for spec in specs]
    return shlex.join(names) if len(names) > 1 else names[0]
