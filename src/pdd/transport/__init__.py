"""Blocking byte streams between agents: one contract, several implementations.

OS errors become ``pdd.core.errors`` here and nowhere above.
"""
