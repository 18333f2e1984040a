"""The bench runs end to end on a fast line; what it measures is not judged here."""

import json
import subprocess
import sys

import pytest

from pdd.link.bench.run import REQUIRED
from pdd.link.packet.process import refusal

WHY_NOT = refusal()


def run_bench(*flags: str) -> dict[str, float | str | None]:
    argv = [sys.executable, "-m", "pdd.link.bench.command", "--json", "--rounds", "1", *flags]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    figures: dict[str, float | str | None] = json.loads(ran.stdout.splitlines()[-1])
    return figures


@pytest.mark.skipif(WHY_NOT is not None, reason=f"no network namespaces here: {WHY_NOT}")
def test_it_ends_in_one_object_of_figures() -> None:
    figures = run_bench("--delay", "1ms", "--only", "small", "--only", "control")
    assert figures["emulator"] == "packet"
    assert float(figures["small_transfer_s"] or 0) > 0.01  # a round trip and a megabyte
    assert float(figures["control_p99_saturated_vs_idle_ratio"] or 0) > 0


def test_loopback_needs_no_line() -> None:
    figures = run_bench("--only", "loopback", "--only", "tls")
    assert float(figures["loopback_vs_bare_reader_ratio"] or 0) > 0
    for name in ("cpu_s_per_gb_send", "cpu_s_per_gb_recv", "tls_cpu_s_per_gb_send", "tls_cpu_s_per_gb_recv"):
        assert float(figures[name] or 0) > 0
    assert set(REQUIRED) <= set(figures)
    assert figures["lossy_line_ratio"] is None
