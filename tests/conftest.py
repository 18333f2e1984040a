"""Tests of one file run in one process, in order; all that boot real engines in one, behind the others.

``make test`` runs two processes (pytest-xdist, ``--dist loadgroup``): what a file's tests share is made once,
and engines that fill both cores have the machine to themselves.
"""

import pytest
from hypothesis import settings

# A busy machine is no failure of the code.
settings.register_profile("pdd", deadline=None)
settings.load_profile("pdd")

ENGINES = "engines"


@pytest.hookimpl(tryfirst=True)  # before xdist writes the groups into the names
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name each test's group; no effect where all tests run in one process."""
    for item in items:
        is_e2e = item.get_closest_marker("e2e") is not None
        item.add_marker(pytest.mark.xdist_group(ENGINES if is_e2e else item.nodeid.partition("::")[0]))
