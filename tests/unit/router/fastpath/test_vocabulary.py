"""The table of a tokenizer gives the text that the detokenizer gives, and they can take turns."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.fast_text import FastText
from tests.kit.tokenizer import (
    EOS,
    REPLACEMENT_PIECES,
    WORD_PIECES,
    byte_tokenizer,
    pieces_tokenizer,
    sentencepiece_tokenizer,
)
from tokenizers import Tokenizer, decoders, models

from pdd.router.detokenize import Detokenizer, TextOptions
from pdd.router.fastpath.vocabulary import Vocabulary, vocabulary_of

TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "pieces": pieces_tokenizer(),
    "sentencepiece": sentencepiece_tokenizer(strips=True),
    "sentencepiece, no strip": sentencepiece_tokenizer(strips=False),
}


def table_of(tokenizer: Tokenizer) -> Vocabulary:
    """The table, which there is."""
    vocabulary = vocabulary_of(tokenizer)
    assert vocabulary is not None
    return vocabulary


TABLES = {name: table_of(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def id_of(name: str, token: str) -> int:
    """A token's ID, which it has."""
    token_id = TOKENIZERS[name].token_to_id(token)
    assert token_id is not None
    return token_id


def entry(name: str, token_id: int) -> bytes:
    """A token's entry in the table."""
    begin, end = TABLES[name].offsets[token_id : token_id + 2]
    return TABLES[name].data[begin:end]


def spell(name: str, text: str) -> list[int]:
    """A text as tokens of single bytes, where the tokenizer has them."""
    tokenizer = TOKENIZERS[name]
    if name == "pieces":
        return []
    if name == "bytes":
        return list(tokenizer.encode(text).ids)
    return [id_of(name, f"<0x{byte:02X}>") for byte in text.encode()]


def tokens_of(name: str) -> st.SearchStrategy[list[int]]:
    """Answers of a tokenizer: any tokens and none, and characters split into bytes."""
    num_ids = len(TABLES[name].offsets) - 1
    told = st.sampled_from([token_id for token_id in range(num_ids) if entry(name, token_id)])
    ids = st.one_of(st.integers(-1, num_ids + 2), told, st.integers(num_ids - 20, num_ids - 1))
    characters = st.text(st.sampled_from("a é\n你😀\ufffd"), max_size=3).map(lambda text: spell(name, text))
    parts = st.one_of(ids.map(lambda token_id: [token_id]), characters)
    return st.lists(parts, max_size=25).map(lambda lists: [i for part in lists for i in part])


def alone(name: str, prompt: Sequence[int], ids: Sequence[int], options: TextOptions) -> list[str]:
    """Each token's text if the detokenizer sees them all."""
    detokenizer = Detokenizer(TOKENIZERS[name], prompt, options)
    return [detokenizer.more([token_id]) for token_id in ids]


def in_turns(
    name: str, prompt: Sequence[int], ids: Sequence[int], options: TextOptions, given_back: set[int]
) -> tuple[list[str], int]:
    """Each token's text if the table is asked wherever it can be, and how many tokens it told.

    Args:
        name: The tokenizer's.
        prompt: The prompt's tokens.
        ids: The answer's tokens.
        options: Given to the detokenizer.
        given_back: At these places of the answer the detokenizer has to go on.
    """
    detokenizer, fast = Detokenizer(TOKENIZERS[name], prompt, options), None
    texts, num_told = [], 0
    for place, token_id in enumerate(ids):
        if fast is None and detokenizer.is_at_boundary:
            fast = FastText(TABLES[name])
        text = None if fast is None or place in given_back else fast.take(token_id)
        if text is not None:
            num_told += 1
        else:
            if fast is not None:
                detokenizer.resume([*prompt, *ids[:place]], held=fast.held, new_tokens=fast.num_tokens)
                fast = None
            text = detokenizer.more([token_id])
        texts.append(text)
    return texts, num_told


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_each_token_gives_the_same_text_whoever_is_asked(name: str, data: st.DataObject) -> None:
    prompt = [i for i in data.draw(tokens_of(name)) if i >= 0]
    ids = data.draw(tokens_of(name))
    options = TextOptions(skip_special_tokens=data.draw(st.booleans()))
    given_back = data.draw(st.sets(st.integers(0, max(len(ids) - 1, 0)), max_size=4))
    assert in_turns(name, prompt, ids, options, given_back)[0] == alone(name, prompt, ids, options)


@pytest.mark.parametrize("name", ["bytes", "sentencepiece"])
def test_the_table_tells_plain_text_by_itself(name: str) -> None:
    text = 'He said "né", 你好 😀\\\n'
    texts, num_told = in_turns(name, [], spell(name, text), TextOptions(), set())
    assert "".join(texts) == text
    assert num_told == len(text.encode()) - 1  # the detokenizer has to begin


def test_a_tail_that_begins_inside_a_character_does() -> None:
    ids = spell("sentencepiece", "你你你")
    detokenizer = Detokenizer(TOKENIZERS["sentencepiece"], [], TextOptions())
    assert [detokenizer.more([token_id]) for token_id in ids[:3]] == ["", "", "你"]
    detokenizer.resume(ids[1:7], held=1, new_tokens=4)
    assert [detokenizer.more([token_id]) for token_id in ids[7:]] == ["", "你"]


@pytest.mark.parametrize(
    "tokens",
    [
        ["a", "x\ufffd", "<0x20>", "<0xE4>", "a"],  # the table told nothing: the stream keeps all it had
        ["a", "a", "<0x20>", "<0xE4>", "a"],  # the stream kept the space alone, which the strip hides
    ],
)
def test_a_spoilt_run_after_a_space_gives_what_it_gave(tokens: list[str]) -> None:
    ids = [id_of("sentencepiece", token) for token in tokens]
    expected = alone("sentencepiece", [], ids, TextOptions())
    assert in_turns("sentencepiece", [], ids, TextOptions(), set())[0] == expected


@pytest.mark.parametrize("byte", range(0x80))
def test_ascii_is_escaped_as_msgspec_does(byte: int) -> None:
    escaped = msgspec.json.encode(chr(byte))[1:-1]
    for name in ("bytes", "sentencepiece"):
        assert entry(name, spell(name, chr(byte))[0]) == escaped


@pytest.mark.parametrize("name", ["pieces", "sentencepiece, no strip"])
def test_a_token_that_is_whole_text_is_what_decoding_gives(name: str) -> None:
    seen = 0
    for token_id in range(len(TABLES[name].offsets) - 1):
        text = TOKENIZERS[name].decode([token_id])
        if entry(name, token_id) and "\ufffd" not in text:
            seen += 1
            assert entry(name, token_id) == msgspec.json.encode(text)[1:-1]
    assert seen > len(WORD_PIECES)


def test_parts_of_characters_are_as_they_are() -> None:
    tokenizer = TOKENIZERS["pieces"]
    pieces = [entry("pieces", i) for i in range(tokenizer.get_vocab_size(with_added_tokens=False))]
    assert {b"\xf0\x9f", b"a\xf0\x9f", b"\x98\x80b", b"\xff", "日本".encode()} <= set(pieces)


@pytest.mark.parametrize("name", ["pieces", "sentencepiece"])
@pytest.mark.parametrize("token", [EOS, "<think>"])
def test_added_tokens_are_left_out(name: str, token: str) -> None:
    assert entry(name, id_of(name, token)) == b""


def test_what_may_end_as_a_replacement_character_is_left_out() -> None:
    told = {entry("pieces", i) for i in range(len(TABLES["pieces"].offsets) - 1)}
    assert told & set(REPLACEMENT_PIECES) == {b"\xbf\xbd", b"\xbd", b"\xbf", b"\xef\xbb"}
    assert entry("sentencepiece", id_of("sentencepiece", "x\ufffd")) == b""


def test_ids_without_a_token_are_left_out_and_those_after_them_are_not() -> None:
    last = id_of("pieces", "last")
    assert [entry("pieces", last - 1), entry("pieces", last)] == [b"", b"last"]


BYTE_FALLBACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


@pytest.mark.parametrize(
    ("decoder", "is_known"),
    [
        (decoders.ByteLevel(), True),
        (decoders.Sequence([decoders.ByteLevel()]), True),
        (decoders.Sequence(BYTE_FALLBACK), True),
        (decoders.Sequence([decoders.Sequence(BYTE_FALLBACK), decoders.Strip(" ", 1, 0)]), True),
        (decoders.Sequence([*BYTE_FALLBACK, decoders.Strip(" ", 0, 1)]), False),
        (decoders.Sequence([*BYTE_FALLBACK, decoders.Strip("_", 1, 0)]), False),
        (decoders.Sequence([decoders.Replace("_", " "), *BYTE_FALLBACK[1:]]), False),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), False),
        (decoders.Metaspace(), False),
        (decoders.WordPiece(), False),
        (None, False),
    ],
)
def test_only_decoders_that_join_tokens_have_a_table(
    decoder: decoders.Decoder | None, is_known: bool
) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    assert (vocabulary_of(tokenizer) is not None) == is_known
