"""KV that crosses coded is the same KV."""

import numpy as np
import pytest
from tests.integration.agent.conftest import Fleet
from tests.kit import engine_side
from tests.kit.bf16 import kv_like

CHUNK = 2**16 + 6


@pytest.fixture(autouse=True)
def chunks_are_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    def kv_of(key: bytes, chunk_bytes: int) -> np.ndarray:
        return kv_like(chunk_bytes // 2, seed=int.from_bytes(key[-16:], "little")).view(np.uint8)

    monkeypatch.setattr(engine_side, "chunk_of", kv_of)


@pytest.mark.parametrize("piece_bytes", [2**20, 10_000])
def test_coded_chunks_land_exact_and_take_less_of_the_line(fleet: Fleet, piece_bytes: int) -> None:
    p, md = fleet.agents(codec="on", piece_bytes=piece_bytes)
    main, prefill = md.engine(chunk_bytes=CHUNK), p.engine(chunk_bytes=CHUNK)
    prefill.push("t", ["md0"], range(20))
    landed = p.wait_event("landed", transfer="t")
    assert landed["payload_bytes"] == landed["full_bytes"] == 20 * CHUNK
    assert landed["wan_bytes"] < 0.8 * landed["payload_bytes"]
    main.check_load(range(20))


@pytest.mark.parametrize("codecs", [("on", "off"), ("off", "on"), ("off", "off")])
def test_one_side_that_does_not_allow_it_is_enough(fleet: Fleet, codecs: tuple[str, str]) -> None:
    config = fleet.configure()
    agents = [
        fleet.agent(
            engine_id,
            config=config.model_copy(update={"agent": config.agent.model_copy(update={"codec": codec})}),
        )
        for engine_id, codec in zip(("p0", "md0"), codecs, strict=True)
    ]
    p, md = agents
    main, prefill = md.engine(chunk_bytes=CHUNK), p.engine(chunk_bytes=CHUNK)
    prefill.push("t", ["md0"], range(5))
    assert p.wait_event("landed", transfer="t")["wan_bytes"] > 5 * CHUNK
    main.check_load(range(5))


def test_a_flipped_byte_in_coded_kv_is_never_visible(fleet: Fleet) -> None:
    fleet.configure(codec="on")
    line = fleet.meddle("md0")
    p, md = fleet.agent("p0"), fleet.agent("md0")
    main, prefill = md.engine(chunk_bytes=CHUNK), p.engine(chunk_bytes=CHUNK)
    flips = [50_000, 90_000, 130_000]

    def flip(index: int, at: int, data: bytes) -> bytes:
        if index and flips and at <= flips[0] < at + len(data):
            where = flips.pop(0) - at
            return data[:where] + bytes([data[where] ^ 8]) + data[where + 1 :]
        return data

    line.tamper = flip
    prefill.push("t", ["md0"], range(20))
    p.wait_event("landed", transfer="t")
    assert len(flips) < 3
    main.check_load(range(20))
