"""Text from token IDs: split characters, stop strings held back, stop tokens left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.tokenizer import EOS, byte_tokenizer

from pdd.router.detokenize import Detokenizer, TextOptions

TOKENIZER = byte_tokenizer()


def run(text: str, *, prompt: str = "", **options: object) -> tuple[list[str], str | None]:
    """The deltas a stream would give for a text, and the stop that ended it."""
    detokenizer = Detokenizer(TOKENIZER, TOKENIZER.encode(prompt).ids, TextOptions(**options))  # type: ignore[arg-type]
    deltas: list[str] = []
    for token in TOKENIZER.encode(text).ids:
        stop = detokenizer.feed(token)
        deltas.append(detokenizer.take(finished=stop is not None))
        if stop is not None:
            return deltas, stop.stop
    deltas.append(detokenizer.take(finished=True))
    return deltas, None


WHOLE_TEXTS = st.text(max_size=20).filter(lambda text: not text.endswith("\ufffd"))
"""What ends with U+FFFD is an unfinished character to the tokenizers' stream, in vLLM too."""


@given(WHOLE_TEXTS, WHOLE_TEXTS)
def test_any_text_comes_back_whole(prompt: str, text: str) -> None:
    assert "".join(run(text, prompt=prompt)[0]) == text


def test_no_part_of_a_character_is_ever_given() -> None:
    deltas, _ = run("a😀é")
    assert [delta for delta in deltas if delta] == ["a", "😀", "é"]


def test_a_replacement_character_waits_for_what_comes_after_it() -> None:
    deltas, _ = run("\ufffda\ufffd")
    assert [delta for delta in deltas if delta] == ["\ufffda"]


def test_a_stop_string_is_cut_off_and_never_shown_in_part() -> None:
    deltas, stop = run("one two END three", stop=("END",))
    assert ("".join(deltas), stop) == ("one two ", "END")
    assert not any("E" in delta for delta in deltas)


def test_a_stop_string_is_kept_where_asked_for() -> None:
    deltas, stop = run("one END two", stop=("END",), include_stop=True)
    assert ("".join(deltas), stop) == ("one END", "END")


def test_what_only_began_like_a_stop_string_is_given_in_the_end() -> None:
    deltas, stop = run("one EN", stop=("END",))
    assert ("".join(deltas), stop) == ("one EN", None)


def test_the_stop_that_completes_first_counts() -> None:
    _, stop = run("abcd", stop=("bcd", "bc"))
    assert stop == "bc"


def test_stops_do_not_count_before_min_tokens() -> None:
    deltas, stop = run("aXbXc", stop=("X",), min_tokens=3)
    assert ("".join(deltas), stop) == ("aXb", "X")


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, f"a{EOS}b")])
def test_special_tokens(skip: bool, text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER, [], TextOptions(skip_special_tokens=skip))
    for token in TOKENIZER.encode(f"a{EOS}b").ids:
        detokenizer.feed(token)
    assert detokenizer.take(finished=True) == text


def test_the_token_that_ended_the_answer_is_no_text() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], TextOptions(skip_special_tokens=False))
    detokenizer.feed(TOKENIZER.encode("a").ids[0])
    detokenizer.feed(TOKENIZER.encode(".").ids[0], ends_as_stop_token=True)
    assert detokenizer.take(finished=True) == "a"


def test_an_invalid_token_id_is_no_text_and_no_error() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], TextOptions())
    detokenizer.feed(-1)
    detokenizer.feed(TOKENIZER.encode("a").ids[0])
    assert detokenizer.take(finished=True) == "a"


def test_it_can_be_taken_over_only_where_nothing_is_held() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], TextOptions())
    seen = [detokenizer.is_at_boundary]
    for token in TOKENIZER.encode("aé").ids:
        detokenizer.feed(token)
        seen.append(detokenizer.is_at_boundary)
        detokenizer.take(finished=False)
        seen.append(detokenizer.is_at_boundary)
    assert seen == [False, False, True, False, False, False, True]


def test_it_is_never_taken_over_where_a_stop_string_may_begin() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], TextOptions(stop=("X",)))
    assert detokenizer.more(TOKENIZER.encode("a").ids) == "a"
    assert not detokenizer.is_at_boundary


def test_it_goes_on_inside_a_character_that_others_began() -> None:
    ids = TOKENIZER.encode("aé😀b").ids
    detokenizer = Detokenizer(TOKENIZER, [], TextOptions())
    assert detokenizer.more(ids[:1]) == "a"
    detokenizer.resume(ids[:5], held=2, new_tokens=4)
    assert not detokenizer.is_at_boundary
    assert [detokenizer.more([token]) for token in ids[5:]] == ["", "😀", "b"]
    assert detokenizer.is_at_boundary


def test_tokens_that_others_made_text_of_count_as_minimum() -> None:
    ids = TOKENIZER.encode("abX").ids
    detokenizer = Detokenizer(TOKENIZER, [], TextOptions(stop=("X",), min_tokens=2))
    detokenizer.resume(ids[:2], held=0, new_tokens=2)
    assert detokenizer.feed(ids[2]) is not None
