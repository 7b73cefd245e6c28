"""Any change to a real config is described or refused in words, and a longer sequence never needs a smaller cache."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dayzero.core.errors import DayZeroError
from dayzero.model.estimate import estimate

CONFIGS = sorted((Path(__file__).parents[1] / "data" / "configs").iterdir())
LOADED = {folder.name: json.loads((folder / "config.json").read_text()) for folder in CONFIGS}

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 200), st.integers(2**40, 2**70), st.floats(), st.text(max_size=5)
)  # fmt: skip
values = st.one_of(
    scalars,
    st.lists(scalars, max_size=5),
    st.dictionaries(st.sampled_from(["1", "head_dim", "num_heads"]), scalars, max_size=3),
)


@st.composite
def mutated(draw):
    """A real config in which some keys, at the top or in a nested object, hold something else or are gone."""
    config = json.loads(json.dumps(LOADED[draw(st.sampled_from(sorted(LOADED)))]))
    for _ in range(draw(st.integers(1, 4))):
        place = config
        nested = [key for key, value in config.items() if isinstance(value, dict) and value]
        if nested and draw(st.booleans()):
            place = config[draw(st.sampled_from(nested))]
            deeper = [key for key, value in place.items() if isinstance(value, dict) and value]
            if deeper and draw(st.booleans()):
                place = place[draw(st.sampled_from(deeper))]
        if not isinstance(place, dict) or not place:
            continue
        key = draw(st.sampled_from(sorted(place)))
        if draw(st.booleans()):
            place[key] = draw(values)
        else:
            del place[key]
    return config


def describe(config):
    try:
        return estimate(config, "bfloat16")
    except DayZeroError as error:
        assert error.what and error.got and error.want and error.fix
        return None


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated())
def test_a_changed_config_is_described_or_refused(config):
    guess = describe(config)
    if guess is None:
        return
    assert sum(guess.by_role.values()) == guess.total_parameters >= guess.active_parameters > 0
    assert all(number > 0 for number in guess.by_role.values())
    assert sorted(layer for kind in guess.layer_kinds for layer in kind.layers) == list(range(guess.dimensions.num_layers))
    assert guess.unknown


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated(), st.integers(0, 10_000), st.integers(0, 10_000))
def test_caches_grow_with_tokens(config, first, second):
    guess = describe(config)
    if guess is None:
        return
    fewer, more = sorted((first, second))
    for kind in guess.layer_kinds:
        for spec in kind.cache:
            assert 0 <= spec.bytes_for(fewer) <= spec.bytes_for(more)
