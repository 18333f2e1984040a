"""One request from rendering to its last byte: a pure state machine and the driver that feeds it."""
