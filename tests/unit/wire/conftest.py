"""Hypothesis measures time; a busy machine is no fault of the code."""

from hypothesis import HealthCheck, settings

settings.register_profile("no_clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no_clock")
