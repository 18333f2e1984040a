"""Decisions as pure functions of a snapshot: pipeline, engines, handoff. Each carries its reason."""
