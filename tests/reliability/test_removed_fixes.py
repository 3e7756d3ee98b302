"""The fixes that `removed_fixes.py` takes out are still where it looks for them."""

import pytest

from tests.reliability.removed_fixes import FIXES, ROOT, RemovedFix


@pytest.mark.parametrize("fix", FIXES, ids=lambda fix: f"{fix.point}-{fix.without}")
def test_the_code_and_the_test_of_a_fix_exist(fix: RemovedFix) -> None:
    for file, code, _ in fix.edits:
        assert code in (ROOT / file).read_text("utf-8"), file
    path, _, test = fix.test.partition("::")
    name = test.partition("[")[0]
    assert f"def {name}" in (ROOT / path).read_text("utf-8"), fix.test
