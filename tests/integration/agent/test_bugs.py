"""An agent with a bug ends, so that another is started; half an agent would look alive."""

import subprocess
import sys

import pytest
from tests.integration.agent.conftest import Fleet

RUN = """
import sys
import {module}
from pdd.agent.main import run_agent
from pdd.config.schema import PddConfig

def broken(*_):
    raise RuntimeError("a bug")

{module}.{target} = broken
sys.exit(run_agent(PddConfig.model_validate_json(sys.argv[1]), "p0"))
"""


@pytest.mark.parametrize(
    ("module", "target"),
    [("pdd.agent.agent", "Agent._accept"), ("pdd.agent.engine_link", "EngineServer._run")],
)
def test_a_thread_that_ends_by_a_bug_ends_the_agent(fleet: Fleet, module: str, target: str) -> None:
    config = fleet.configure("p0", "md0")
    ended = subprocess.run(
        [sys.executable, "-c", RUN.format(module=module, target=target), config.model_dump_json()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    assert "ended by a bug" in ended.stderr
    assert "RuntimeError: a bug" in ended.stderr
