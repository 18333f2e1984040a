"""Ports for programs that listen later."""

import socket
from pathlib import Path

import pytest

from pdd.launch import ports


def test_they_are_different_free_and_never_given_to_outgoing_connections() -> None:
    first, last = map(int, ports.OUTGOING.read_text().split())
    chosen = ports.free_ports(20)
    assert len(set(chosen)) == 20
    assert not any(first <= port <= last for port in chosen)
    for port in chosen:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_what_was_chosen_is_not_chosen_again_soon_though_nobody_listens_yet() -> None:
    assert set(ports.free_ports(50)).isdisjoint(ports.free_ports(50))


def test_one_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [taken, free] = ports.free_ports(2)
    monkeypatch.setattr(ports, "LOWEST", min(taken, free))
    monkeypatch.setattr(ports, "HIGHEST", max(taken, free) + 1)
    range_file = tmp_path / "range"
    range_file.write_text(f"{min(taken, free) + 1} {max(taken, free) - 1}\n")
    monkeypatch.setattr(ports, "OUTGOING", range_file)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", taken))
        assert ports.free_ports(1) == [free]
        with pytest.raises(OSError, match="2 ports were asked for, 1 are free"):
            ports.free_ports(2)
