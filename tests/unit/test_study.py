"""The study's plan and tables, from results made up for the purpose."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny


@pytest.fixture(scope="module")
def study() -> ModuleType:
    """benchmarks/study.py, beside which lies what it imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tiny.ROOT / "benchmarks"))
        return importlib.import_module("study")


def test_every_comparison_has_its_cases(study: ModuleType) -> None:
    cases = study.cases()
    assert len(cases) == len(set(cases)) == len({case.name for case in cases})
    for g in (2, 1):
        for method in ("mean", "first", "random"):
            assert {one.seed for one in cases if (one.kv_heads, one.method, one.alpha) == (g, method, 0.05)} == {
                0,
                1,
                2,
            }
    for g in (4, 2, 1, None):
        assert {one.alpha for one in cases if (one.kv_heads, one.method) == (g, "mean")} == {0, 0.01, 0.02, 0.05, 0.1}
    assert {(one.kv_heads, one.alpha) for one in cases if one.distill and one.method == "mean"} == {
        (g, alpha) for g in (4, 2, 1) for alpha in (0.01, 0.02, 0.05, 0.1)
    }
    assert {
        (one.kv_heads, one.alpha) for one in cases if one.method == "aligned" and one.distill == (one.alpha > 0)
    } == {(g, alpha) for g in (4, 2, 1) for alpha in (0, 0.005, 0.01, 0.02, 0.05, 0.1)}


def test_tables_hold_means_and_spreads(study: ModuleType, tmp_path: Path) -> None:
    results: dict[str, Any] = {}
    for case in study.cases():
        value = 100 * (case.kv_heads or 8) + 1000 * case.alpha + case.seed + (0.5 if case.distill else 0)
        value -= 50 if case.method == "aligned" else 0
        value -= 7 if case.rate == study.GENTLE else 0
        results[case.name] = {"case": study.asdict(case), "perplexity": value, "tokens": 1}
    study.write(results, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "| 2 | 251.00 ± 1.00 | 251.00 ± 1.00 | 251.00 ± 1.00 |" in text
    distilled = "| g = 4, mean, distilled | 400.00 | - | 410.50 | 420.50 | 451.50 ± 1.00 | 500.50 | 0.531 |"
    assert distilled in text, "451.5 / 851"
    assert "| original, trained on | 800.00 | - | 810.00 | 820.00 | 851.00 ± 1.00 | 900.00 | 1.000 |" in text
    assert "| g = 2, aligned, distilled | 150.00 | 155.50 | 160.50 | 170.50 | 200.50 | 250.50 | 0.236 |" in text
    assert "| g = 1, aligned | 50.00 | - | - | - | 100.00 | - | 0.118 |" in text
    assert "| g = 2, aligned, distilled | 150.00 | 200.50 | 193.50 |" in text
    assert "| original, trained on | 800.00 | 851.00 ± 1.00 | 843.00 |" in text, "one seed at the gentler rate"
    assert "| 1 | 150.00, 151.00, 152.00 | 1.000 |" in text
    assert (tmp_path / "budgets.png").read_bytes().startswith(b"\x89PNG")
