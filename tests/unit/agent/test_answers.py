from pdd.agent.answers import Answers
from pdd.policy.unasked import Position, UnaskedParams


def make() -> Answers:
    return Answers(UnaskedParams())


def key(i: int) -> bytes:
    return b"%d" % i


def test_what_the_peer_is_known_to_hold_is_asked_for_first() -> None:
    answers = make()
    assert answers.is_surely_lacking(key(0), Position.FIRST)
    answers.remember(key(0))
    assert not answers.is_surely_lacking(key(0), Position.FIRST)
    answers.learn(key(0), Position.FIRST, is_lacking=True)  # evicted there
    assert answers.is_surely_lacking(key(0), Position.FIRST)


def test_what_follows_a_held_chunk_may_be_the_peers_own_answer() -> None:
    answers = make()
    assert not answers.is_surely_lacking(key(0), Position.AFTER_HELD)
    for i in range(200):
        answers.learn(key(i), Position.AFTER_HELD, is_lacking=True)
    assert answers.is_surely_lacking(key(999), Position.AFTER_HELD)


def test_one_surprise_stops_it_until_many_answers_say_otherwise() -> None:
    answers = make()
    answers.learn(key(0), Position.FIRST, is_lacking=False)
    assert not answers.is_surely_lacking(key(1), Position.FIRST)
    assert answers.is_surely_lacking(key(1), Position.AFTER_LACKING)
    num_answers = 0
    while not answers.is_surely_lacking(key(999), Position.FIRST):
        num_answers += 1
        answers.learn(key(num_answers), Position.FIRST, is_lacking=True)
    assert 10 < num_answers < 20


def test_a_known_chunk_teaches_nothing_of_others() -> None:
    answers = make()
    answers.remember(key(0))
    answers.learn(key(0), Position.FIRST, is_lacking=False)
    assert answers.is_surely_lacking(key(1), Position.FIRST)
