"""``pdd bench link``: our agents beside plain TCP and NIXL, on one emulated line in one run.

Figures are meant as ratios inside one run: absolute ones say more about the machine than about PDD. The bench
starts real ``pdd agent`` processes at the two sites of a packet line and plays their engines (``engine``);
``plain`` is what ordinary sockets reach, ``nixl`` what NIXL's UCX reaches over TCP, where it is installed.
"""
