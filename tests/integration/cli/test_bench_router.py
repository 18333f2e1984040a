"""``pdd bench router`` runs, counts every token, and says what it could not compare with."""

import json
import subprocess
import sys

KEYS = ("cpu_us_per_token", "first_byte_p50_s", "lost_events")


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
        [*command, *small, "--base-port", "26900"], capture_output=True, text=True, timeout=200, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert all(figures[key] is not None for key in KEYS)
    assert figures["lost_events"] == 0
    assert figures["errors"] == []
    assert figures["rss_mb_4_streams"] > 10
    assert figures["vllm_router_cpu_us_per_token"] is None
    assert "no-such-program is not installed" in ran.stderr
