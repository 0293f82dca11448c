"""Numbers in sentences."""

import pytest

from limes.config.counting import num_of


@pytest.mark.parametrize(("number", "text"), [(0, "0 rollouts"), (1, "1 rollout"), (2, "2 rollouts")])
def test_only_one_is_no_plural(number: int, text: str) -> None:
    assert num_of(number, "rollout") == text
