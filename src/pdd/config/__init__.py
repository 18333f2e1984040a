"""The one configuration file: its schema, its defaults, and how a wrong one is explained."""
