"""The command line as a user meets it: exit codes, standard output kept for the one JSON object, help with examples."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import reports
import tiny

from headpool.cli import app
from headpool.console import show


def headpool(*arguments: str | Path, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "headpool", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


def as_json(*arguments: str | Path, cwd: Path | None = None) -> dict[str, Any]:
    out = headpool(*arguments, "--json", cwd=cwd).stdout
    assert out.count("\n") == 1
    result: dict[str, Any] = json.loads(out)
    return result


VERBS = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]


def test_help_has_an_example_for_every_verb() -> None:
    assert {"plan", "convert", "eval", "report", "run"} <= set(VERBS)
    for verb in VERBS:
        assert f"Example: headpool {verb}" in " ".join(headpool(verb, "--help").stdout.split())


def test_help_and_errors_load_no_heavy_package() -> None:
    script = """
import sys, headpool.cli
sys.argv = ["headpool", "--help"]
try:
    headpool.cli.main()
except SystemExit:
    heavy = ("torch", "transformers", "numpy", "pydantic", "datasets", "matplotlib")
    print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_plan_convert_and_eval_together(tmp_path: Path) -> None:
    model, out = tiny.QUICKSTART, tmp_path / "gqa2"
    planned = as_json("plan", model, "--context", "512")
    assert {"layers": 4, "heads": 8, "kv_heads": 8, "head_dim": 16}.items() <= planned.items()
    two = next(option for option in planned["options"] if option["kv_heads"] == 2)
    # 2 x 4 layers x 2 K/V heads x 16 x 2 bytes
    assert (two["group_size"], two["cache_bytes_per_token"], two["saved"]) == (4, 512, 0.75)
    assert two["cache_bytes"] == 512 * 512

    converted = as_json("convert", model, out, "--kv-heads", "2")
    assert {
        "output": str(out),
        "method": "mean",
        "source_kv_heads": 8,
        "kv_heads": 2,
        "pooled_tensors": 8,
    }.items() <= converted.items()
    assert converted["seconds"] > 0
    assert 50e6 < converted["peak_rss_bytes"] < 5e9
    assert two["weight_bytes"] == planned["weight_bytes"] - 8 * 96 * 128 * 2

    text = tmp_path / "text.txt"
    text.write_text(tiny.NOVEL.read_text()[:20_000])
    report = as_json("eval", out, "--baseline", model, "--data", text, "--out", tmp_path / "report", "--window", "128")
    baseline, pooled = report["models"]
    assert (baseline["role"], pooled["role"], pooled["kv_heads"]) == ("baseline", "model", 2)
    assert pooled["label"] == "converted, not yet uptrained"
    assert report["comparison"]["perplexity_ratio"] == pytest.approx(pooled["perplexity"] / baseline["perplexity"])
    assert report["comparison"]["perplexity_ratio"] > 2
    assert report["comparison"]["cache_ratio"] == 0.25
    assert pooled["cache_bytes_per_token"]["formula"] == pooled["cache_bytes_per_token"]["allocated"] == 1024
    assert pooled["cache_bytes_per_token"]["formula_in_checkpoint_dtype"] == two["cache_bytes_per_token"]
    assert json.loads((tmp_path / "report" / "report.json").read_text())["models"] == report["models"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["convert", tiny.QUICKSTART, "{out}", "--kv-heads", "3"],
            "do not divide into 3; possible are 8, 4, 2, 1",
        ),
        (["convert", "no/where", "{out}", "--kv-heads", "2"], "no/where"),
        (["convert", tiny.QUICKSTART, "{out}", "--kv-heads", "2", "--max-shard-size", "much"], "much"),
        (["convert", tiny.QUICKSTART, "{out}"], "--kv-heads"),
        (["plan", "/nowhere"], "no such directory: /nowhere"),
        (["plan", tiny.QUICKSTART, "--memory", "lots"], "lots"),
        (["eval", tiny.QUICKSTART, "--data", "/nowhere.txt", "--out", "{out}"], "no such file: /nowhere.txt"),
        (
            ["eval", tiny.QUICKSTART, "--data", tiny.NOVEL, "--out", "{out}", "--window", "4096"],
            "window 4096 is larger than the 512",
        ),
        (
            ["eval", tiny.QUICKSTART, "--data", tiny.NOVEL, "--out", "{out}", "--device", "meta"],
            "'meta' cannot be used",
        ),
        (["eval", tiny.QUICKSTART, "--data", tiny.NOVEL, "--out", "{out}", "--contexts", "8,x"], "'8,x' is no list"),
        (
            ["eval", tiny.QUICKSTART, tiny.QUICKSTART, "--data", tiny.NOVEL, "--out", "{out}", "--revision", "v1"],
            "--revision belongs to one MODEL",
        ),
        (["run", "quickstart", "convert.kv_head=2", "output={out}"], "did you mean kv_heads?"),
        (["run", "nothing"], "no recipe 'nothing'"),
        (["report", "{out}"], "no report.json in"),
        (["frobnicate"], "No such command"),
    ],
)
def test_impossible_requests_exit_with_2_and_write_nothing(arguments: list[Any], says: str, tmp_path: Path) -> None:
    done = headpool(*(str(one).format(out=tmp_path / "out") for one in arguments), code=2)
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_report_is_drawn_anew(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(reports.pair()))
    names = ["quality-against-cache.png", "cache-against-context.png", "report.html"]
    assert as_json("report", tmp_path) == {"files": [str(tmp_path / name) for name in names]}
    assert all((tmp_path / name).stat().st_size > 1000 for name in names)
    (tmp_path / "report.json").write_text("{}")
    done = headpool("report", tmp_path, code=2)
    assert done.stderr == f"headpool: {tmp_path}/report.json is no report of headpool eval: models: Field required\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["plan", tiny.QUICKSTART], ["plan", tiny.QUICKSTART, "--json"]])
def test_a_full_standard_output_is_one_line_and_no_traceback(arguments: list[Any]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "headpool", *map(str, arguments)],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["headpool: No space left on device"]


def test_a_file_that_is_not_to_be_read_is_named() -> None:
    script = 'from headpool.console import run_to_exit; run_to_exit(lambda: open("gone/x"))'
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "headpool: gone/x: No such file or directory\n")


def test_failures_exit_with_1(tmp_path: Path) -> None:
    script = f"""
import resource, sys, headpool.cli
resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
sys.argv = ["headpool", "convert", {str(tiny.QUICKSTART)!r}, {str(tmp_path / "out")!r}, "--kv-heads", "2"]
headpool.cli.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the disk filled up" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_recipes_are_listed_and_copied(tmp_path: Path) -> None:
    assert "quickstart/gqa2" in headpool("recipes").stdout
    listed = as_json("recipes")["recipes"]
    assert {"name": "quickstart/gqa2", "command": "headpool run quickstart/gqa2"} in listed
    headpool("recipes", "copy", "quickstart", cwd=tmp_path)
    assert (tmp_path / "quickstart" / "gqa2.yaml").is_file()
    headpool("recipes", "copy", "quickstart", cwd=tmp_path, code=2)


def test_brackets_in_paths_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    show("wrote models[v2]/a[/b]", {}, as_json=False)
    assert capsys.readouterr().out == "wrote models[v2]/a[/b]\n"
