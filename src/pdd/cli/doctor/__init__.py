"""``pdd doctor``: what keeps a deployment from working, found before users find it."""
