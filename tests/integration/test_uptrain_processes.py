"""Several processes over gloo: DDP, sharding, and going on in another number of them."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import here
import pytest
import tiny
import torch
import training

from headpool.errors import HeadpoolError, Interrupted
from headpool.launch import command, launch_uptraining
from headpool.uptrain import loop, parallel
from headpool.uptrain.run import uptrain

STEPS = 20
OVERRIDES = [f"uptrain.tokens={STEPS * training.SEQUENCE * training.BATCH}", "uptrain.eval_every=10"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a finished run of one process, in one micro-batch a step, in `out`; its first gradients in `out.pt`."""
    with pytest.MonkeyPatch.context() as patched:
        here.check_here(patched)
        path = training.recipe_file(tmp_path_factory.mktemp("processes"))
        training.note_gradients(patched, path.parent / "out.pt")
        uptrain(training.load(path, *OVERRIDES))
        return path


def overrides(recipe: Path, output: str, *more: str) -> list[str]:
    folder = recipe.parent / output
    folder.mkdir()
    (folder / "converted").symlink_to(recipe.parent / "out" / "converted")
    return [f"output={folder}", *OVERRIDES, *more]


def torchrun(*program: str) -> str:
    """Two processes; what they print on standard output."""
    environment = os.environ | {"PYTHONPATH": str(tiny.ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def check_same_course(recipe: Path, output: str) -> None:
    lines, wanted = training.metrics(recipe, output), training.metrics(recipe)
    assert [line["step"] for line in lines] == [line["step"] for line in wanted] == list(range(STEPS + 1))
    for key, tolerance in (("loss", 1e-5), ("learning_rate", 0), ("gradient_norm", 1e-5)):
        assert [line[key] for line in lines[1:]] == pytest.approx([line[key] for line in wanted[1:]], abs=tolerance), (
            key
        )
    validated = [[line["validation_perplexity"] for line in one if line["step"] % 10 == 0] for one in (lines, wanted)]
    assert validated[0] == pytest.approx(validated[1], rel=1e-5)
    weights, expected = (tiny.tensors(recipe.parent / one / "uptrained") for one in (output, "out"))
    for name, tensor in expected.items():
        # Adam makes a whole step of a gradient that is all rounding, so single weights may differ by more.
        assert weights[name].shape == tensor.shape
        assert (weights[name] - tensor).norm() < 2e-4 * tensor.norm(), name


def check_same_gradients(recipe: Path, output: str) -> None:
    found, wanted = (torch.load(recipe.parent / f"{one}.pt") for one in (output, "out"))
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6, msg=name)
    assert max(gradient.abs().max() for gradient in wanted.values()) > 1e-3


def test_accumulation_over_unequal_parts_changes_no_gradient(recipe: Path, quick_check: None) -> None:
    with pytest.MonkeyPatch.context() as patched:
        counts: list[int] = []
        accumulate = loop._accumulate

        def count(run: loop.Run, batch: Any) -> torch.Tensor:
            counts.extend(int((part >= 0).sum()) for part in batch.labels.split(2))
            return accumulate(run, batch)

        patched.setattr(loop, "_accumulate", count)
        training.note_gradients(patched, recipe.parent / "parts.pt")
        uptrain(training.load(recipe, *overrides(recipe, "parts", "uptrain.micro_batch=2")))
    assert len(set(counts[:4])) > 1, "the parts of the first step count equally many tokens: no test of unequal ones"
    check_same_gradients(recipe, "parts")
    check_same_course(recipe, "parts")


def test_two_processes_do_what_one_does_and_one_goes_on_from_them(recipe: Path, quick_check: None) -> None:
    given = overrides(recipe, "ddp", "uptrain.micro_batch=3")
    torchrun(str(tiny.ROOT / "tests" / "training.py"), str(recipe), str(recipe.parent / "ddp.pt"), *given)
    check_same_gradients(recipe, "ddp")
    check_same_course(recipe, "ddp")
    shutil.rmtree(recipe.parent / "ddp" / "work" / "uptrain" / "state" / f"step-{STEPS:08d}")
    resumed = uptrain(training.load(recipe, *given))
    assert (resumed.processes, resumed.resumed_from) == (1, 18)
    check_same_course(recipe, "ddp")


def test_a_signal_reaches_launched_processes_which_save(recipe: Path) -> None:
    given = [f"output={recipe.parent / 'stopped'}", "uptrain.tokens=1000000000", "uptrain.eval_every=1000000"]
    given += ["uptrain.save_every=1h", "uptrain.launch={num_processes: 2}"]
    work = recipe.parent / "stopped" / "work" / "uptrain"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    verb = [sys.executable, "-m", "headpool", "run", str(recipe), *given]
    with subprocess.Popen(verb, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and len(training.metrics(recipe, "stopped")) < 3:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "the same command goes on from what was saved" in said
    [saved] = (work / "state").iterdir()
    assert saved.name == f"step-{training.metrics(recipe, 'stopped')[-1]['step']:08d}"


LAUNCHER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]]).wait()
"""

CHILD = """
import signal, sys, time
from pathlib import Path
from headpool.destination import locked
work = Path(sys.argv[1])
def save(*_):
    time.sleep(0.5)
    (work / "saved").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, save)
with locked(work, ""):
    print("said by a child", flush=True)
    (work / "begun").touch()
    time.sleep(60)
"""


def test_a_child_whose_launcher_dies_of_a_signal_is_told_and_waited_for(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As accelerate's does, where it launches one process."""
    work = recipe.parent / "left" / "work" / "uptrain"
    program = [sys.executable, "-c", LAUNCHER, CHILD, str(work)]
    monkeypatch.setattr("headpool.launch.command", lambda *_, **__: program)

    def stop() -> None:
        while not (work / "begun").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Interrupted):
        launch_uptraining(training.load(recipe, f"output={recipe.parent / 'left'}"), {})
    thread.join()
    assert (work / "saved").exists()
    assert capfd.readouterr().out == "", "standard output is for the run's own result"


APART = """
import os
import sys
from pathlib import Path
from accelerate import Accelerator
from headpool.errors import HeadpoolError
from headpool.uptrain.parallel import check_shared
accelerator = Accelerator(cpu=True)
folders = [Path(name) for name in sys.argv[1:]]
check_shared(folders[0], accelerator)
try:
    check_shared(folders[accelerator.process_index], accelerator)
except HeadpoolError as error:
    line = f"{error}".splitlines()[0] + "\\n"
    os.write(sys.stdout.fileno(), line.encode())  # at once: print may let the other process in before the line's end
accelerator.end_training()
"""


def test_processes_that_do_not_share_the_disk_are_refused(tmp_path: Path) -> None:
    (tmp_path / "apart.py").write_text(APART)
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    said = torchrun(str(tmp_path / "apart.py"), *map(str, folders))
    assert sorted(said.splitlines()) == [
        f"process 1 does not see what process 0 writes in {folder}: "
        "the output must lie on a disk that all machines share"
        for folder in folders
    ]


def test_sharded_training_resumes_in_one_process_and_writes_whole_checkpoints(recipe: Path, quick_check: None) -> None:
    given = overrides(recipe, "sharded", "uptrain.sharding=full")
    launch_uptraining(training.load(recipe, *given), {"num_processes": 2})  # torchrun -m headpool uptrain
    check_same_course(recipe, "sharded")
    work = recipe.parent / "sharded" / "work" / "uptrain" / "state"
    parts = [path.stat().st_size for path in (work / f"step-{STEPS:08d}").glob("*.distcp")]
    assert len(parts) == 2
    assert min(parts) > 0.3 * sum(parts), "one process wrote nearly everything: nothing was sharded"
    shutil.rmtree(work / f"step-{STEPS:08d}")
    resumed = uptrain(training.load(recipe, *given, "uptrain.sharding=none"))
    assert (resumed.processes, resumed.resumed_from) == (1, 18)
    check_same_course(recipe, "sharded")


def test_sharding_that_did_not_come_about_is_refused() -> None:
    workers: Any = SimpleNamespace(objective=torch.nn.Linear(2, 2))
    parallel._check_sharding(workers, wanted=False)
    with pytest.raises(HeadpoolError, match="sharding was asked for, and no weights are sharded"):
        parallel._check_sharding(workers, wanted=True)


def test_fewer_processes_than_were_asked_for_are_refused(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADPOOL_PROCESSES", "2")
    with pytest.raises(HeadpoolError, match="2 processes were asked for, 1 came up"):
        uptrain(training.load(recipe, *OVERRIDES))


def test_the_command_that_launches() -> None:
    gpu = command({"num_processes": 8, "config_file": "f.yaml", "multi_gpu": True, "debug": False}, has_gpu=True)
    assert gpu[1:] == [
        "-m", "accelerate.commands.launch", "--num_processes", "8", "--config_file", "f.yaml", "--multi_gpu",
        "-m", "headpool", "uptrain",
    ]  # fmt: skip
    assert "torch.distributed.run" in command({"num_processes": 2}, has_gpu=False)
