"""``pdd demo``: two datacenters on one machine, and a short script that shows what they do."""
