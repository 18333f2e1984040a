"""Simulator and planner: what a fleet would do with a stream of requests, and which fleet to buy.

Knows policies, configuration and the core; no engine, no socket, no router. Everything it predicts comes
from a scenario file, so a figure can always be traced to the assumption behind it.
"""
