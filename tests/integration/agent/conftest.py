"""Fleets of agents on loopback for one test."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit.agent_fleet import AgentProcess, RunningAgent, make_config, wait_for
from tests.kit.meddler import Meddler

from pdd.config.schema import PddConfig


class Fleet:
    """What a test started, to be stopped after it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._stops: list[Callable[[], object]] = []
        self.config: PddConfig

    def configure(self, *ids: str, **options: Any) -> PddConfig:
        self.config = make_config(self._run_dir, ids or ("p0", "md0"), **options)
        return self.config

    def agents(self, *ids: str, **options: Any) -> list[RunningAgent]:
        """Agents of this process, with one engine each still to come."""
        self.configure(*ids, **options)
        return [self.agent(engine.id) for engine in self.config.engines]

    def agent(self, engine_id: str, *, config: PddConfig | None = None, **options: Any) -> RunningAgent:
        agent = RunningAgent(config or self.config, engine_id, **options)
        self._stops.append(agent.stop)
        return agent

    def process(self, engine_id: str, *, path: Path | None = None) -> AgentProcess:
        process = AgentProcess(self.config, engine_id, log=self._run_dir / f"{engine_id}.log", path=path)
        self._stops.append(process.stop)
        return process

    def meddle(self, target_id: str) -> Meddler:
        """A relay in front of an agent's data port; the configuration sends peers there."""
        target = self.config.engine(target_id)
        meddler = Meddler(f"{target.host}:{target.data_port}")
        self._stops.append(meddler.close)
        engines = tuple(
            engine.model_copy(update={"advertise": meddler.address}) if engine.id == target_id else engine
            for engine in self.config.engines
        )
        self.config = self.config.model_copy(update={"engines": engines})
        return meddler

    @property
    def run_dir(self) -> Path:
        return self._run_dir

    def stop(self) -> None:
        for stop in reversed(self._stops):
            stop()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    before = set(threading.enumerate())
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.stop()
    wait_for(lambda: not [t for t in threading.enumerate() if t not in before], "all threads to end")
