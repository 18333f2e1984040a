"""The protocols as bytes and states, without sockets: between agents, and between an engine and its agent."""
