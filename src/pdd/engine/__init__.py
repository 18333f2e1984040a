"""What runs inside a vLLM engine, and how one is started; beside ``pdd.parse`` all that knows vLLM.

- ``vllm_api``: every vLLM name used here, and the versions that have them.
- ``connector``, ``shape``: the connector, which says what the KV cache consists of.
- ``spec``, ``support``, ``host_copy``: the offloading spec, what it refuses, and the worker that vLLM lacks
  on the CPU backend.
- ``tier``, ``orders``, ``promotion``: the secondary tier, what the router asks of it, and the bound on what
  its lookups promise.
- ``agent_link``, ``mirror``: the connection to the agent, and what is known through it.
- ``identity``: the fingerprint of what this engine's KV bytes mean.
- ``carried_state``: logits processors by which penalties and seeds of another engine go on.
- ``command``, ``models``, ``families``: command lines for stock ``vllm serve``, and models to serve; they
  import no vLLM.
"""
