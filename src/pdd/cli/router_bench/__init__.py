"""``pdd bench router``: this router and vllm-router over the same fake engines, in the same run."""
