"""What runs inside a vLLM engine, and how one is started; the only package that knows vLLM and torch.

- ``vllm_api``: every vLLM name used here, and the versions that have them.
- ``spec``, ``support``, ``host_copy``: the offloading spec, what it refuses, and the worker that vLLM lacks
  on the CPU backend.
- ``tier``, ``orders``, ``promotion``: the secondary tier, what the router asks of it, and the bound on what
  its lookups promise.
- ``agent_link``, ``mirror``: the connection to the agent, and what is known through it.
- ``identity``: the fingerprint of what this engine's KV bytes mean.
- ``command``, ``models``: command lines for stock ``vllm serve``, and models to serve; they import no vLLM.
"""
