"""Packets as ``PACKET_VNET_HDR`` sockets give them: how long they are on a wire, and cutting them in two.

The kernel hands over "superpackets": up to 64 KiB of one TCP flow with a note of the segment size. A line
loses, queues and carries segments, so this module counts them and cuts superpackets between two of them.

Source:
    ``struct virtio_net_hdr`` (Linux UAPI ``virtio_net.h``; virtio 1.2, section 5.1.6); partial checksums as
    in Linux ``tcp_gso_segment``.
"""

import struct
from dataclasses import dataclass
from typing import Final

VNET_HEADER: Final = struct.Struct("=BBHHHH")
"""flags, gso type, header length, segment size, checksum start, checksum offset; host byte order."""
ETHERNET_BYTES: Final = 14
_NEEDS_CHECKSUM: Final = 1
_GSO_NONE: Final = 0
_GSO_TCP: Final = (1, 4)
_GSO_ECN: Final = 0x80
_IPV4: Final = 0x0800
_IPV6: Final = 0x86DD
_TCP: Final = 6
_FIN_PSH: Final = 0x09
_CWR: Final = 0x80


@dataclass(frozen=True, slots=True)
class Packet:
    """One packet, or a superpacket of several segments of one TCP flow.

    ``wire_bytes`` is what all its segments take on an Ethernet wire, headers of each included.
    """

    data: bytes
    wire_bytes: int
    num_segments: int = 1
    header_bytes: int = 0
    segment_bytes: int = 0


def read_packet(data: bytes) -> Packet:
    """The packet in what a socket received: offload header and frame."""
    _, gso, _, segment_bytes, tcp_start, _ = VNET_HEADER.unpack_from(data)
    frame_bytes = len(data) - VNET_HEADER.size
    if gso & ~_GSO_ECN not in _GSO_TCP or not segment_bytes:
        return Packet(data, frame_bytes)
    header_bytes = tcp_start + (data[VNET_HEADER.size + tcp_start + 12] >> 4) * 4
    num_segments = max(1, -(-(frame_bytes - header_bytes) // segment_bytes))
    wire_bytes = frame_bytes + (num_segments - 1) * header_bytes
    return Packet(data, wire_bytes, num_segments, header_bytes, segment_bytes)


def cut_packet(packet: Packet, num_segments: int) -> tuple[Packet, Packet]:
    """The first ``num_segments`` segments, and the rest.

    Raises:
        ValueError: If one of them would be empty.
    """
    if not 0 < num_segments < packet.num_segments:
        raise ValueError(f"cannot cut {num_segments} of {packet.num_segments} segments")
    at = VNET_HEADER.size + packet.header_bytes + num_segments * packet.segment_bytes
    head = packet.data[: VNET_HEADER.size + packet.header_bytes]
    first = _make(packet, head, packet.data[VNET_HEADER.size + packet.header_bytes : at], 0, is_last=False)
    skipped_bytes = num_segments * packet.segment_bytes
    return first, _make(packet, head, packet.data[at:], skipped_bytes, is_last=True)


def flow_of(packet: Packet) -> tuple[tuple[bytes, bytes], bool] | None:
    """Both ends of a TCP packet, the same for both directions, and whether it opens a connection."""
    data = packet.data
    ethernet = VNET_HEADER.size
    kind = int.from_bytes(data[ethernet + 12 : ethernet + 14], "big")
    ip = ethernet + ETHERNET_BYTES
    if kind == _IPV4 and data[ip + 9] == _TCP:
        tcp, source, sink = ip + (data[ip] & 15) * 4, data[ip + 12 : ip + 16], data[ip + 16 : ip + 20]
    elif kind == _IPV6 and data[ip + 6] == _TCP:
        tcp, source, sink = ip + 40, data[ip + 8 : ip + 24], data[ip + 24 : ip + 40]
    else:
        return None
    ends = source + data[tcp : tcp + 2], sink + data[tcp + 2 : tcp + 4]
    opens = data[tcp + 13] & 0x12 == 0x02
    return (min(ends), max(ends)), opens


def _make(packet: Packet, head: bytes, payload: bytes, skipped_bytes: int, *, is_last: bool) -> Packet:
    flags, gso, _, segment_bytes, tcp_start, checksum_offset = VNET_HEADER.unpack_from(head)
    frame = bytearray(head[VNET_HEADER.size :])
    _fix_tcp(frame, tcp_start, skipped_bytes, is_last=is_last)
    tcp_bytes = packet.header_bytes - tcp_start + len(payload)
    pseudo = _fix_ip(frame, tcp_start, tcp_bytes)
    if flags & _NEEDS_CHECKSUM:
        struct.pack_into("!H", frame, tcp_start + checksum_offset, pseudo)
    num_segments = -(-len(payload) // segment_bytes)
    if num_segments == 1:
        gso, segment_bytes = _GSO_NONE, 0
    header = VNET_HEADER.pack(flags, gso, packet.header_bytes, segment_bytes, tcp_start, checksum_offset)
    wire_bytes = len(payload) + num_segments * packet.header_bytes
    return Packet(
        b"".join((header, frame, payload)),
        wire_bytes,
        num_segments,
        packet.header_bytes,
        packet.segment_bytes,
    )


def _fix_tcp(frame: bytearray, tcp_start: int, skipped_bytes: int, *, is_last: bool) -> None:
    if is_last:
        sequence = int.from_bytes(frame[tcp_start + 4 : tcp_start + 8], "big")
        struct.pack_into("!I", frame, tcp_start + 4, (sequence + skipped_bytes) % 2**32)
        frame[tcp_start + 13] &= ~_CWR & 0xFF
    else:
        frame[tcp_start + 13] &= ~_FIN_PSH & 0xFF


def _fix_ip(frame: bytearray, tcp_start: int, tcp_bytes: int) -> int:
    """Lengths are right; returns the sum over the pseudo header, as partial checksums hold it."""
    ip = ETHERNET_BYTES
    if frame[ip] >> 4 == 4:
        struct.pack_into("!H", frame, ip + 2, tcp_start - ip + tcp_bytes)
        struct.pack_into("!H", frame, ip + 10, 0)
        struct.pack_into("!H", frame, ip + 10, 0xFFFF ^ _sum(frame[ip:tcp_start]))
        addresses = frame[ip + 12 : ip + 20]
    else:
        struct.pack_into("!H", frame, ip + 4, tcp_start - ip - 40 + tcp_bytes)
        addresses = frame[ip + 8 : ip + 40]
    return _sum(addresses + struct.pack("!II", tcp_bytes, _TCP))


def _sum(data: bytearray) -> int:
    """Ones' complement sum of 16-bit words.

    Source:
        RFC 1071.
    """
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total
