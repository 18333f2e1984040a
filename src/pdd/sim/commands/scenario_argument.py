"""The scenario that a command was given."""

import argparse

from pdd.core.errors import ConfigurationError
from pdd.sim.scenario import Scenario
from pdd.sim.scenario_file import load_scenario

Arguments = argparse.Namespace


def scenario_of(arguments: Arguments) -> Scenario:
    if arguments.scenario is None:
        raise ConfigurationError("this needs a scenario file: expected its path after 'bench sim'")
    return load_scenario(arguments.scenario, overrides=tuple(arguments.overrides))
