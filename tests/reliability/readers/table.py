"""All readers by name."""

from tests.reliability.readers.annotated import ANNOTATED
from tests.reliability.readers.artifacts import ARTIFACTS
from tests.reliability.readers.given import GIVEN
from tests.reliability.readers.indexes import INDEXES
from tests.reliability.readers.labeled import LABELED
from tests.reliability.readers.reader import Reader
from tests.reliability.readers.runs import RUNS
from tests.reliability.readers.sentences import SENTENCES

READERS: dict[str, Reader] = {**RUNS, **INDEXES, **LABELED, **ANNOTATED, **SENTENCES, **GIVEN, **ARTIFACTS}
