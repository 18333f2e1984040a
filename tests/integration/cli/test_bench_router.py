"""``pdd bench router`` runs, counts every token, and says what it could not compare with."""

import json
import subprocess
import sys

from pdd.launch.ports import free_ports

KEYS = ("cpu_us_per_token", "first_byte_p50_s", "lost_events")


def base_port() -> int:
    """The first of a dozen free ports in a row."""
    while True:
        ports = free_ports(12)
        if ports[-1] - ports[0] == 11:
            return ports[0]


def test_a_small_run_loses_nothing() -> None:
    small = ("--streams", "4", "--many-streams", "4", "--window-s", "1", "--saturating-tokens", "50")
    command = (
        sys.executable,
        "-m",
        "pdd.cli",
        "bench",
        "router",
        "--json",
        "--vllm-router",
        "no-such-program",
    )
    ran = subprocess.run(
        [*command, *small, "--base-port", str(base_port())],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert all(figures[key] is not None for key in KEYS)
    assert figures["lost_events"] == 0
    assert figures["errors"] == []
    assert figures["rss_mb_4_streams"] > 10
    assert figures["vllm_router_cpu_us_per_token"] is None
    assert "no-such-program is not installed" in ran.stderr
