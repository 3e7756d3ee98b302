"""Export of trained models; one format per file, each compared with its run.

The package is also the function `patchloom.export`: importing it replaces the name in `patchloom`.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *values: Any, **options: Any) -> Any:
        from patchloom.export.export import export

        return export(*values, **options)


sys.modules[__name__].__class__ = _CallablePackage
