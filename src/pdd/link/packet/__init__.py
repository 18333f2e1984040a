"""The packet emulator: a line between two network namespaces that shows what real TCP does on it.

Two *sites*, ``a`` and ``b``, are network namespaces of their own, joined only by the emulated line. Each site
ends in a veth pair whose other end the emulator reads and writes with ``AF_PACKET`` sockets; packets keep
their offload headers (``PACKET_VNET_HDR``), so one read moves up to 64 KiB. Programs run at a site are
ordinary programs: the kernel's TCP meets the line's rate, delay, jitter, queue, loss, cuts and middleboxes.

``frames``, ``pipe`` and ``middlebox`` are arithmetic, ``namespaces`` makes the sites, ``loop`` moves packets,
``main`` is the emulator's process and ``process`` the handle that others hold. No root is needed where user
namespaces are allowed; where they are refused, ``NamespacesRefusedError`` says why, and the relay is left.
"""
