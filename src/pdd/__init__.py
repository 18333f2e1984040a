"""PDD: cross-datacenter prefill/decode serving on stock vLLM engines."""

__version__ = "0.1.0"
