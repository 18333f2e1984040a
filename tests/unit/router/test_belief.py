"""What the router believes of an engine's caches."""

from hypothesis import given
from hypothesis import strategies as st

from pdd.router.belief import CacheBelief, PromptBlocks, block_name

BLOCK_TOKENS = 16


def prompt(
    num_blocks: int, *, tail_tokens: int = 5, blocks_per_chunk: int = 1, base: int = 0
) -> PromptBlocks:
    return PromptBlocks(
        names=tuple(range(base, base + num_blocks)),
        num_tokens=num_blocks * BLOCK_TOKENS + tail_tokens,
        block_tokens=BLOCK_TOKENS,
        blocks_per_chunk=blocks_per_chunk,
    )


def test_a_name_is_what_vllm_publishes_by_default() -> None:
    block_hash = bytes(range(32))
    assert block_name(block_hash) == int.from_bytes(block_hash, "big") & (2**64 - 1)


def test_held_is_the_longest_prefix_on_the_device_then_in_the_store() -> None:
    belief = CacheBelief(max_blocks=100)
    belief.on_device(range(3))
    belief.in_store([4, 5, 6])
    assert belief.held_tokens(prompt(8)) == 3 * BLOCK_TOKENS  # block 3 is nowhere
    belief.in_store([3])
    assert belief.held_tokens(prompt(8)) == 7 * BLOCK_TOKENS
    belief.off_device([0])
    assert belief.held_tokens(prompt(8)) == 0
    belief.in_store([0, 1, 2])
    assert belief.held_tokens(prompt(8)) == 7 * BLOCK_TOKENS


def test_the_last_token_of_a_prompt_is_never_held() -> None:
    belief = CacheBelief(max_blocks=100)
    belief.on_device(range(4))
    assert belief.held_tokens(prompt(4, tail_tokens=0)) == 3 * BLOCK_TOKENS
    assert belief.held_tokens(prompt(4, tail_tokens=1)) == 4 * BLOCK_TOKENS
    assert belief.held_tokens(prompt(0, tail_tokens=0)) == 0


def test_a_chunk_is_known_by_its_last_block_and_found_whole_or_not_at_all() -> None:
    asked = prompt(9, blocks_per_chunk=4)
    belief = CacheBelief(max_blocks=100)
    belief.in_store([3])
    assert belief.missing_chunks(asked) == 1
    assert belief.held_tokens(asked) == 4 * BLOCK_TOKENS
    belief.on_device(range(6))  # a device prefix that ends within a chunk
    assert belief.held_tokens(asked) == 6 * BLOCK_TOKENS
    belief.in_store([7])
    assert belief.held_tokens(asked) == 8 * BLOCK_TOKENS
    assert belief.missing_chunks(asked) == 0


def test_what_lands_or_is_offloaded_is_not_offered_again_and_the_device_does_not_count() -> None:
    belief = CacheBelief(max_blocks=100)
    belief.on_device(range(10))
    assert belief.missing_chunks(prompt(10)) == 10
    belief.in_store(range(7))
    assert belief.missing_chunks(prompt(10)) == 3


def test_both_indexes_are_bounded_and_the_least_recently_used_go_first() -> None:
    belief = CacheBelief(max_blocks=3)
    belief.on_device([1, 2, 3])
    belief.on_device([1, 4])
    belief.in_store([1, 2, 3])
    belief.in_store([1, 4])
    assert (belief.num_device_blocks, belief.num_chunks) == (3, 3)
    belief.clear_device()
    assert belief.num_device_blocks == 0
    assert [belief.missing_chunks(prompt(1, base=chunk)) for chunk in (1, 2, 3, 4)] == [0, 1, 0, 0]


def test_no_more_is_believed_to_be_in_a_store_than_it_has_slots_for_or_says_it_uses() -> None:
    belief = CacheBelief(max_blocks=100)
    belief.in_store(range(50))
    belief.store_is(slots=40, used=30)
    assert belief.num_chunks == 30
    assert belief.missing_chunks(prompt(50)) == 20
    belief.in_store(range(100, 160))
    assert belief.num_chunks == 40
    belief.store_is(slots=0, used=0)  # an agent that has just started and waits for its engine
    assert belief.num_chunks == 0
    belief.in_store(range(200))
    assert belief.num_chunks == 100


@given(st.lists(st.integers(0, 12)), st.lists(st.integers(0, 12)), st.integers(1, 4), st.integers(0, 30))
def test_held_is_a_number_of_whole_blocks_below_the_prompt(
    device: list[int], store: list[int], blocks_per_chunk: int, tail_tokens: int
) -> None:
    belief = CacheBelief(max_blocks=8)
    belief.on_device(device)
    belief.in_store(store)
    asked = prompt(10, blocks_per_chunk=blocks_per_chunk, tail_tokens=tail_tokens)
    held = belief.held_tokens(asked)
    assert held % BLOCK_TOKENS == 0
    assert 0 <= held < asked.num_tokens
    for block in range(held // BLOCK_TOKENS):
        end_of_chunk = (block // blocks_per_chunk + 1) * blocks_per_chunk - 1
        assert block in device or end_of_chunk in store
