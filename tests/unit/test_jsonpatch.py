"""A patched JSON text differs from the source in the asked-for values alone."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headpool.jsonpatch import patch_json

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def updated(held: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`held` with `changes`, also within the objects that both have."""
    both = {
        key for key in held.keys() & changes.keys() if isinstance(held[key], dict) and isinstance(changes[key], dict)
    }
    return {**held, **changes, **{key: updated(held[key], changes[key]) for key in both}}


@given(
    held=st.dictionaries(st.text(), values, max_size=5),
    changes=st.dictionaries(st.text(), values, max_size=3),
    indent=st.sampled_from([None, 2, "\t"]),
    ascii_only=st.booleans(),
)
def test_means_the_same_as_updating_the_object(held: Any, changes: Any, indent: Any, ascii_only: bool) -> None:
    text = json.dumps(held, indent=indent, ensure_ascii=ascii_only)
    assert json.loads(patch_json(text, changes)) == updated(held, changes)


def test_leaves_every_other_byte_alone() -> None:
    text = '{ "a" : 1e-5,\r\n\t"kv": 32 , "deep": {"kv": [1, {"kv": 2}]}, "\\u00e9\\"": "}" }\n'
    assert patch_json(text, {"kv": 4}) == text.replace('"kv": 32', '"kv": 4')


def test_a_new_key_takes_the_indentation_of_its_neighbours() -> None:
    text = '{\n  "heads": 32\n}\n'
    assert patch_json(text, {"kv": 4}) == '{\n  "kv": 4,\n  "heads": 32\n}\n'
    assert patch_json("{}", {"kv": 4}) == '{"kv": 4}'


@pytest.mark.parametrize("text", ["", "[]", "3", '{"a" 1}'])
def test_refuses_what_is_no_object(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|Expecting"):
        patch_json(text, {"a": 2})


def test_a_mapping_changes_within_the_object_that_is_there() -> None:
    text = '{"a": {"x": 1.50, "y": {"z":  null}}, "b": 2}'
    assert patch_json(text, {"a": {"x": 3, "new": 4}}) == '{"a": {"new": 4,"x": 3, "y": {"z":  null}}, "b": 2}'
    assert patch_json(text, {"a": {"y": {"z": 5}}}) == '{"a": {"x": 1.50, "y": {"z":  5}}, "b": 2}'
    assert json.loads(patch_json(text, {"b": {"x": 3}})) == {"a": {"x": 1.5, "y": {"z": None}}, "b": {"x": 3}}
