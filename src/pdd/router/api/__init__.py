"""What clients see: endpoints, bodies, errors and event streams, as OpenAI's and vLLM's clients expect."""
