"""The fixture gyre_conform of pytest: runs a function on ranks, and fails with the report.

def test_my_attention(gyre_conform):
    gyre_conform("inputs/golden", "my_package.cp:attention", ranks=2)

pytest --gyre-report FILE.json adds every run to a report, whose page is FILE.html.
"""

from collections.abc import Callable
from typing import Any

import pytest

from . import certificate
from .conform import Report, Unable, conform


def pytest_addoption(parser: Any) -> None:
    parser.getgroup("gyre").addoption("--gyre-report", default="", metavar="FILE.json", help="report of gyre_conform's runs")


@pytest.fixture
def gyre_conform(request: Any) -> Callable[..., Report]:
    """gyre.distributed.conform, whose report fails the test; what this machine lacks skips it."""

    def run(suite: Any, function: str, **options: Any) -> Report:
        try:
            report = conform(suite, function, **options)
        except Unable as error:
            pytest.skip(str(error))
        if file := request.config.getoption("--gyre-report"):
            certificate.add(file, report)
        if not report.passed:
            pytest.fail(str(report), pytrace=False)
        return report

    return run
