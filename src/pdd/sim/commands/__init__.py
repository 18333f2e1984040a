"""The simulator on the command line: one module a command; ``flags`` puts them together."""
