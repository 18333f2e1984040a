"""Both pipelines and both handoff modes, from a client's request to the record of it."""

import pytest
from tests.kit.bed import running_bed

LONG = "The quick brown fox jumps over the lazy dog. " * 4


async def test_p_md_answers_like_one_plain_engine() -> None:
    async with running_bed(router={"pipeline": "p-md"}) as bed:
        body = await bed.chat(LONG, max_tokens=40)
        assert body["choices"][0]["message"]["content"] == bed.reference(LONG, 40)
        record = await bed.record(body["id"])
        assert (record["pipeline"], record["handoff_mode"], record["outcome"]) == ("p-md", None, "complete")
        assert record["md_cached_tokens"] > 0
        await bed.until_free()


@pytest.mark.parametrize("mode", ["one-shot", "catch-up"])
async def test_p_rld_md_answers_like_one_plain_engine(mode: str) -> None:
    async with running_bed(router={"pipeline": "p-rld-md", "handoff": mode}) as bed:
        bed.agents["p0"].lands_after["md0"] = (bed.rld0, 6)
        body = await bed.chat(LONG, max_tokens=80)
        assert body["choices"][0]["message"]["content"] == bed.reference(LONG, 80)
        record = await bed.record(body["id"])
        assert record["handoff_mode"] == mode
        assert 0 < record["eager_tokens"] < 80
        assert record["second_token_s"] < record["wan_landed_s"]
        assert record["md_recomputed_tokens"] <= 32 + 1 + record["eager_tokens"]
        await bed.until_free()
