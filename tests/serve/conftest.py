from collections.abc import Iterator

import pytest

from serve.live import EMBEDDED, Live, random_model, serving


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    """One server for all tests that leave it as they found it."""
    with serving(batch=4, queue=64, stall_seconds=600.0) as server:  # a test may read nothing for a while
        yield server


@pytest.fixture(scope="session")
def embedded() -> Iterator[Live]:
    """The model that is shipped."""
    with serving(model=EMBEDDED or random_model(), batch=4) as server:
        yield server
