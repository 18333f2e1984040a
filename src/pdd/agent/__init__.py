"""The process beside each engine: it owns the landing store and moves KV between engines.

Knows neither vLLM nor torch; chunks are opaque bytes under content-addressed keys.
"""
