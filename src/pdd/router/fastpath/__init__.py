"""Tokens of an answer's steady state go from the engine's socket to the client's without Python."""
