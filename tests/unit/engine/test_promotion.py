"""The livelock bound: what may be promised, to whom, and that every request ends in bounded time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.engine.promotion import MAX_PROMOTIONS, Answer, Decision, PromotionBound


def key(name: str, number: int) -> bytes:
    return f"{name}/{number}".encode()


def scan(
    bound: PromotionBound, request: str, num_chunks: int, now_s: float, *, prefix: str | None = None
) -> list[Answer]:
    """One visit of vLLM's scheduler to a waiting request: MISS ends it, RETRY does not."""
    answers: list[Answer] = []
    for number in range(1, num_chunks + 1):
        decision = bound.ask(request, key(prefix or request, number), chunk_number=number, now_s=now_s)
        bound.check_invariants()
        answers.append(decision.answer)
        if decision.answer is Answer.MISS:
            break
    return answers


def test_a_prompt_beyond_the_share_gets_the_share_and_a_miss() -> None:
    bound = PromotionBound(16)
    assert scan(bound, "a", 20, 0.0) == [Answer.PROMOTE] * 12 + [Answer.MISS]


def test_two_prompts_that_together_are_too_long_take_turns() -> None:
    bound = PromotionBound(16)
    assert set(scan(bound, "a", 8, 0.0)) == {Answer.PROMOTE}
    assert scan(bound, "b", 8, 0.0) == [Answer.PROMOTE] * 4 + [Answer.RETRY] * 4
    bound.release(["a"])
    assert set(scan(bound, "b", 8, 0.1)) == {Answer.PROMOTE}


def test_only_one_request_waits_half_served() -> None:
    bound = PromotionBound(16)
    scan(bound, "a", 6, 0.0)
    scan(bound, "b", 8, 0.0)
    bound.release(["a"])
    # Room for two, but b waits for two more than it has, and would never get them if c took these.
    assert set(scan(bound, "c", 4, 0.1)) == {Answer.RETRY}
    assert set(scan(bound, "b", 8, 0.1)) == {Answer.PROMOTE}


def test_waiting_ends_in_a_miss_and_lets_others_on() -> None:
    bound = PromotionBound(16, retry_limit_s=2.0)
    scan(bound, "a", 12, 0.0)
    assert scan(bound, "b", 8, 0.0) == [Answer.RETRY] * 8
    assert scan(bound, "b", 8, 1.9) == [Answer.RETRY] * 8
    assert scan(bound, "b", 8, 2.0) == [Answer.MISS]


def test_a_shared_prefix_is_counted_once() -> None:
    bound = PromotionBound(16)
    scan(bound, "a", 12, 0.0, prefix="same")
    assert set(scan(bound, "b", 12, 0.0, prefix="same")) == {Answer.PROMOTE}
    assert bound.promised_chunks == 12
    bound.release(["a"])
    assert bound.promised_chunks == 12
    bound.release(["b"])
    assert bound.promised_chunks == 0


def test_a_chunk_evicted_again_and_again_is_a_miss() -> None:
    bound = PromotionBound(16)
    for _ in range(MAX_PROMOTIONS):
        assert scan(bound, "a", 1, 0.0) == [Answer.PROMOTE]
    assert scan(bound, "a", 1, 0.0) == [Answer.MISS]
    # Another request is not to blame.
    assert scan(bound, "b", 1, 0.0, prefix="a") == [Answer.PROMOTE]


def test_promises_of_a_request_that_stopped_asking_lapse() -> None:
    bound = PromotionBound(16, retry_limit_s=60.0, lapse_s=5.0)
    scan(bound, "resumed after preemption", 12, 0.0)
    assert scan(bound, "b", 1, 4.0) == [Answer.RETRY]
    assert scan(bound, "b", 1, 6.0) == [Answer.PROMOTE]


def test_a_tiny_primary_tier_promises_nothing_and_hangs_nobody() -> None:
    assert scan(PromotionBound(1), "a", 3, 0.0) == [Answer.MISS]


def test_release_of_an_unknown_request_does_nothing() -> None:
    bound = PromotionBound(16)
    bound.release(["never seen"])
    bound.check_invariants()


class Primary:
    """vLLM's primary tier as lookups see it: LRU, and only the key being promoted is protected."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.keys: dict[bytes, None] = {}

    def promote(self, key: bytes, pending: set[bytes]) -> bool:
        while len(self.keys) >= self.num_slots:
            victim = next((k for k in self.keys if k not in pending), None)
            if victim is None:
                return False
            del self.keys[victim]
        self.keys[key] = None
        return True


def all_run(
    bound: PromotionBound, prompts: dict[str, list[bytes]], *, num_slots: int, max_starts: int
) -> bool:
    """Whether a model of the scheduler gets every request to run within 20 s of 50 ms steps.

    A step visits all waiting requests. One whose scan met neither RETRY nor a chunk on its way runs.
    """
    primary = Primary(num_slots)
    waiting = list(prompts)
    for step in range(400):
        pending: set[bytes] = set()
        started: list[str] = []
        for request in waiting:
            if not visit(bound, primary, request, prompts[request], pending, step * 0.05):
                started.append(request)
                if len(started) == max_starts:
                    break
        bound.release(started)
        waiting = [request for request in waiting if request not in started]
        if not waiting:
            return True
    return False


def visit(
    bound: PromotionBound,
    primary: Primary,
    request: str,
    prompt: list[bytes],
    pending: set[bytes],
    now_s: float,
) -> bool:
    """Whether the scan postpones the request; as vLLM's lookups and its prefix scan together."""
    postponed = False
    for number, chunk in enumerate(prompt, start=1):
        if chunk in primary.keys:
            postponed |= chunk in pending
            continue
        answer = bound.ask(request, chunk, chunk_number=number, now_s=now_s).answer
        if answer is Answer.MISS or (answer is Answer.PROMOTE and not primary.promote(chunk, pending)):
            break
        postponed = True
        if answer is Answer.PROMOTE:
            pending.add(chunk)
    return postponed


@settings(max_examples=100, deadline=None)
@given(
    num_slots=st.integers(1, 24),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    num_shared=st.integers(0, 6),
    max_starts=st.integers(1, 4),
)
def test_every_request_runs_whatever_the_lengths(
    num_slots: int, lengths: list[int], num_shared: int, max_starts: int
) -> None:
    prompts = {
        f"r{i}": [
            key("shared" if number <= num_shared else f"r{i}", number) for number in range(1, length + 1)
        ]
        for i, length in enumerate(lengths)
    }
    bound = PromotionBound(num_slots, retry_limit_s=2.0)
    assert all_run(bound, prompts, num_slots=num_slots, max_starts=max_starts)
    bound.check_invariants()
    assert bound.promised_chunks == 0


class NoBound(PromotionBound):
    """What a tier does that answers HIT whenever it holds a chunk."""

    def ask(self, *_: object, **__: object) -> Decision:  # type: ignore[override]
        return Decision(answer=Answer.PROMOTE, reason="always")


def test_without_the_bound_the_same_model_never_ends() -> None:
    prompts = {"r": [key("r", number) for number in range(1, 21)]}
    assert not all_run(NoBound(16), prompts, num_slots=16, max_starts=1)
    assert all_run(PromotionBound(16), prompts, num_slots=16, max_starts=1)
