"""End to end on real vLLM engines: one fleet is booted for all of these tests."""
