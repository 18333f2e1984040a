"""The ``pdd`` command: reads flags, calls the parts, prints for people. The only place that prints."""
