"""The native way of tokens in the middle of an answer, from an engine's socket to the client's."""
