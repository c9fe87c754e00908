"""The fixture gyre_conform of pytest: runs a function on ranks, and fails with the report.

def test_my_attention(gyre_conform):
    gyre_conform("inputs/golden", "my_package.cp:attention", ranks=2)
"""

from collections.abc import Callable
from typing import Any

import pytest

from .conform import Report, Unable, conform


@pytest.fixture
def gyre_conform() -> Callable[..., Report]:
    """gyre.distributed.conform, whose report fails the test; what this machine lacks skips it."""

    def run(suite: Any, function: str, **options: Any) -> Report:
        try:
            report = conform(suite, function, **options)
        except Unable as error:
            pytest.skip(str(error))
        if not report.passed:
            pytest.fail(str(report), pytrace=False)
        return report

    return run
