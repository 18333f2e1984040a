"""The protocols as bytes and states, without sockets: what is said between agents, and between engine and agent."""
