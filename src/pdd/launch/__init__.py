"""Starts, watches and stops the programs a deployment consists of, and leaves nothing behind.

Owns child processes, their logs, their readiness and their remains (sockets, shared memory). Knows the
command lines of engines, agents, router and link, but none of their internals.
"""
