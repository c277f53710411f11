"""The Python API: what the verbs call, under the names that README promises, imported when it is asked for."""

import inspect
import subprocess
import sys
from typing import get_type_hints

import pytest

import headpool.convert
import headpool.eval
import headpool.geometry
import headpool.publish
import headpool.uptrain


@pytest.mark.parametrize(
    ("function", "home"),
    [
        (headpool.geometry.plan, "headpool.geometry"),
        (headpool.convert.convert_checkpoint, "headpool.convert.run"),
        (headpool.uptrain.uptrain, "headpool.uptrain.run"),
        (headpool.eval.evaluate, "headpool.eval.measure"),
        (headpool.publish.publish, "headpool.publish"),
    ],
)
def test_what_the_verbs_call(function: object, home: str) -> None:
    assert inspect.isfunction(function)
    assert function.__module__ == home
    assert (inspect.getdoc(function) or "").count("\n") >= 2
    assert "Raises" in (inspect.getdoc(function) or "")
    if home != "headpool.geometry":  # its types are those of a module that imports it
        assert "return" in get_type_hints(function)


@pytest.mark.parametrize("package", [headpool.convert, headpool.uptrain, headpool.eval])
def test_all_that_a_package_offers_is_there_and_nothing_else(package: object) -> None:
    for name in package.__all__:  # type: ignore[attr-defined]
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_a_package_imports_nothing_heavy_by_itself() -> None:
    script = "import sys, headpool.convert, headpool.uptrain, headpool.eval, headpool.geometry, headpool.publish\n"
    script += "print([one for one in ('torch', 'transformers', 'huggingface_hub', 'accelerate') if one in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
