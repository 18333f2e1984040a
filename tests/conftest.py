"""Tests of one file run in one process, in order; all that boot real engines in one, behind the others.

``make test`` runs two processes (pytest-xdist): what a file's tests share is made once, and engines that fill
both cores have the machine to themselves.
"""

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# A busy machine is no failure of the code.
settings.register_profile("pdd", deadline=None)
settings.load_profile("pdd")

END_TO_END = "tests/e2e"


class ByFile(LoadScopeScheduling):
    """One unit of work is a file, or all of the end-to-end tests."""

    def _split_scope(self, nodeid: str) -> str:
        return END_TO_END if nodeid.startswith(END_TO_END) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """How tests are dealt to the processes."""
    return ByFile(config, log)
