"""What runs inside a vLLM engine, and how one is started; the only package that knows vLLM and torch.

- ``vllm_api``: every vLLM name used here, and the versions that have them.
- ``spec``, ``host_copy``: the offloading spec; on the CPU backend also the worker vLLM lacks there.
- ``tier``, ``agent_link``, ``promotion``: the secondary tier, its connection to the agent, and the bound
  on what its lookups promise.
- ``identity``: the fingerprint of what this engine's KV bytes mean.
- ``command``, ``models``: command lines for stock ``vllm serve``, and models to serve; they import no vLLM.
"""
