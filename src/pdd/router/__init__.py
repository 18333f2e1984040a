"""The OpenAI endpoint and the control plane: one process that owns every client's stream."""
