"""Superpackets are cut between segments so that a receiver cannot tell."""

import struct

import pytest

from pdd.link.packet.frames import VNET_HEADER, Packet, cut_packet, flow_of, read_packet

SEGMENT = 1000
TCP_START = 34


def superpacket(payload: bytes, *, flags: int = 0x18, sequence: int = 2**32 - 500, gso: int = 1) -> bytes:
    """One IPv4 TCP superpacket as a socket gives it."""
    ip = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, 40 + len(payload), 7, 0, 64, 6, 0, b"\x0a\x4d\0\1", b"\x0a\x4d\0\2"
    )
    tcp = struct.pack("!HHIIBBHHH", 4000, 5000, sequence, 9, 0x50, flags, 100, 0, 0)
    vnet = VNET_HEADER.pack(1, gso, 54, SEGMENT if gso else 0, TCP_START, 16)
    return vnet + bytes(12) + b"\x08\x00" + ip + tcp + payload


def words_sum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def fields(packet: Packet) -> dict[str, int]:
    frame = packet.data[10:]
    return {
        "gso": packet.data[1],
        "ip_bytes": int.from_bytes(frame[16:18], "big"),
        "ip_sum": words_sum(frame[14:34]),
        "sequence": int.from_bytes(frame[38:42], "big"),
        "flags": frame[47],
        "check": int.from_bytes(frame[50:52], "big"),
    }


def test_a_superpacket_counts_as_its_segments_do_on_a_wire() -> None:
    packet = read_packet(superpacket(bytes(3500)))
    assert packet.num_segments == 4
    assert packet.wire_bytes == 3500 + 4 * 54


def test_a_single_packet_is_one_segment() -> None:
    packet = read_packet(superpacket(bytes(800), gso=0))
    assert (packet.num_segments, packet.wire_bytes) == (1, 854)


def test_a_cut_keeps_every_byte_in_its_place() -> None:
    payload = bytes(range(250)) * 14
    packet = read_packet(superpacket(payload))
    first, rest = cut_packet(packet, 3)
    assert first.data[64:] + rest.data[64:] == payload
    assert (first.num_segments, rest.num_segments) == (3, 1)
    assert first.wire_bytes + rest.wire_bytes == packet.wire_bytes
    assert fields(first)["sequence"] == 2**32 - 500
    assert fields(rest)["sequence"] == 2500
    assert fields(first)["ip_bytes"] == 3040
    assert fields(rest)["ip_bytes"] == 540


def test_a_cut_leaves_valid_checksums() -> None:
    for part in cut_packet(read_packet(superpacket(bytes(2600))), 1):
        tcp_bytes = len(part.data) - 10 - TCP_START
        pseudo = bytes.fromhex("0a4d00010a4d0002") + struct.pack("!II", tcp_bytes, 6)
        assert fields(part)["ip_sum"] == 0xFFFF
        assert fields(part)["check"] == words_sum(pseudo)


def test_only_the_last_part_pushes_and_ends() -> None:
    first, rest = cut_packet(read_packet(superpacket(bytes(2600), flags=0x99)), 1)
    assert fields(first)["flags"] == 0x90
    assert fields(rest)["flags"] == 0x19


def test_a_single_segment_is_no_superpacket_any_more() -> None:
    first, rest = cut_packet(read_packet(superpacket(bytes(2600))), 1)
    assert (fields(first)["gso"], fields(rest)["gso"]) == (0, 1)


@pytest.mark.parametrize("num_segments", [0, 3])
def test_a_cut_leaves_something_on_both_sides(num_segments: int) -> None:
    with pytest.raises(ValueError, match="cannot cut"):
        cut_packet(read_packet(superpacket(bytes(2600))), num_segments)


def test_a_flow_has_one_name_in_both_directions() -> None:
    there = superpacket(b"", gso=0, flags=0x02)
    back = bytearray(superpacket(b"", gso=0, flags=0x12))
    back[36:44] = there[40:44] + there[36:40]
    back[44:48] = there[46:48] + there[44:46]
    assert flow_of(read_packet(there)) == (flow_of(read_packet(bytes(back)))[0], True)
    assert flow_of(read_packet(bytes(back)))[1] is False
