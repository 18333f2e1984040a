"""The emulated line between two sites: a relay of TCP connections with a rate and a delay.

Owns the emulator, its control API and the client of that API. Knows addresses and bytes, nothing of what they
mean. It works anywhere, without privileges, since it is an ordinary program; in exchange it cannot show what
happens below TCP: no loss, no congestion control, no slow start, and the kernel's buffers on either side of
it hold some data that a real line would not.
"""
