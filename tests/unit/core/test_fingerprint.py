"""Two engines are compatible exactly when nothing that gives KV bytes their meaning differs."""

import pytest

from pdd.core.fingerprint import FIELDS, differing_fields

OURS = {name: f"value of {name}" for name in FIELDS}


def test_equal_fingerprints_are_compatible() -> None:
    assert differing_fields(OURS, dict(OURS)) == ()


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_is_compared_and_named(name: str) -> None:
    assert differing_fields(OURS, OURS | {name: "other"}) == (f"{name}: value of {name} != other",)


def test_a_missing_field_is_a_difference() -> None:
    theirs = {name: value for name, value in OURS.items() if name != "dtype"}
    assert differing_fields(OURS, theirs) == ("dtype: value of dtype != absent",)
