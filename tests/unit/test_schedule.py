"""Learning rates by hand."""

import math

import pytest

from headpool.sections import ScheduleSection
from headpool.uptrain.schedule import learning_rate


def rates(steps: int, **options: object) -> list[float]:
    section = ScheduleSection.model_validate(options)
    return [learning_rate(section, 2.0, step, steps) for step in range(steps)]


def test_the_rate_rises_in_equal_steps_and_reaches_the_peak_at_the_end_of_the_warm_up() -> None:
    assert rates(20, shape="constant", warmup=0.2)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_a_constant_rate_is_constant() -> None:
    assert rates(7, shape="constant", warmup=0) == [2.0] * 7


def test_cosine_ends_at_the_final_share_by_way_of_the_middle() -> None:
    found = rates(10, shape="cosine", warmup=0, final=0.1)
    assert found[4] == pytest.approx(2 * (0.1 + 0.9 * 0.5))
    assert found[9] == pytest.approx(0.2)
    assert found[0] == pytest.approx(2 * (0.1 + 0.9 * (1 + math.cos(math.pi / 10)) / 2))


def test_wsd_is_flat_and_then_a_line() -> None:
    found = rates(10, shape="wsd", warmup=0, decay=0.4, final=0.0)
    assert found[:6] == [2.0] * 6
    assert found[6:] == pytest.approx([1.5, 1.0, 0.5, 0.0])


def test_wsd_with_decay_one_is_linear() -> None:
    assert rates(4, shape="wsd", warmup=0, decay=1.0, final=0.2) == pytest.approx([1.6, 1.2, 0.8, 0.4])


def test_one_step_is_enough() -> None:
    assert rates(1, shape="cosine") == pytest.approx([0.2])
