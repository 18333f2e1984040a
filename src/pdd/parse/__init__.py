"""Tool calls and reasoning, parsed by vLLM's own parsers in a process beside the router."""
