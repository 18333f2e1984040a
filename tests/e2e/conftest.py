"""Boots the fleet once, and checks at the end that it left nothing behind."""

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from tests.e2e.fleet import Fleet, running_fleet

from pdd.engine.models import prepare_tiny_model

BOOT_AND_TEST_S = 1200
"""A test's limit counts its fixtures: the fleet boots in one, and engines that were killed boot in others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of this folder have the longer limit."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(BOOT_AND_TEST_S))


def orphaned_shared_memory() -> set[str]:
    """Names in the machine's shared memory that no living process has mapped: what a dead one left behind."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            text = maps.read_text()
            names = {name for name in names if f"/dev/shm/{name}" not in text}
    return names


@pytest.fixture(scope="session")
def tiny_model_dir() -> Path:
    """The tiny model with large weight variance, made once and cached."""
    return prepare_tiny_model(Path(os.environ.get("PDD_MODEL_CACHE", ".cache/models")))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleet(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """The running fleet."""
    orphans_before = orphaned_shared_memory()
    async with running_fleet(tiny_model_dir, tmp_path_factory.mktemp("fleet")) as running:
        pids = [child.pid for child in running.children.values()]
        yield running
    assert not [pid for pid in pids if psutil.pid_exists(pid)], "processes are left"
    assert orphaned_shared_memory() <= orphans_before, "shared memory is left"
