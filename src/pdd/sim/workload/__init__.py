"""Streams of requests: recorded traces and generated ones, all in one shape."""
