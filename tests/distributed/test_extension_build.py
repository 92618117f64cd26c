"""DeepSpeed's shared-memory extension is built once for all ranks, and a build that was killed does not hang the next start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.distributed.launched import ROOT, LaunchedRun

NAME = "deepspeed_shm_comm"


@pytest.fixture
def flags(corpus: Path) -> list[str]:
    return f"--data {corpus} --global_batch_size 4 --steps 2 --eval_every 0".split()


def test_the_lock_of_a_killed_build_is_cleared(two_ranks, flags, tmp_path):
    two_ranks.run("os:getpid")  # these ranks have built it
    built = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or ROOT / ".cache/torch_extensions")
    extensions = tmp_path / "extensions"
    shutil.copytree(built, extensions)  # with its times, so that there is nothing to build
    (extensions / NAME / "lock").touch()
    run = LaunchedRun(tmp_path / "runs", "r", 1, 2, flags, TORCH_EXTENSIONS_DIR=str(extensions))
    assert run.wait() == 0, run.output()
    assert f"Removing {extensions / NAME / 'lock'}: the build that made it was killed" in run.output()
    assert "Building" not in run.output() and run.last_step() == 2


@pytest.mark.long
@pytest.mark.parametrize("survivors", [False, True], ids=["all", "compilers-live-on"])
def test_a_start_after_a_killed_build_builds_once_and_trains(survivors, flags, tmp_path):
    extensions = tmp_path / "extensions"
    environment = {"TORCH_EXTENSIONS_DIR": str(extensions)}
    run = LaunchedRun(tmp_path / "runs", "r", 1, 2, flags, **environment)
    run.wait_until(lambda: any(process.name() == "cc1plus" for process in run.processes()))
    assert run.output().count("Building DeepSpeed's shared-memory extension") == 1
    if survivors:
        for process in (run.process, run.launcher(), run.rank(0), run.rank(1)):
            process.kill()
    else:
        run.kill()
    assert (extensions / NAME / "lock").exists()
    again = LaunchedRun(tmp_path / "runs", "r", 1, 2, [*flags, "--resume"], **environment)
    # Compilers that live on finish what they compile, which nobody uses: the start waits for them, then builds.
    assert again.wait(patience=300.0) == 0, again.output()
    run.wait()
    assert again.output().count("the build that made it was killed") == 1
    assert again.output().count("Building DeepSpeed's shared-memory extension") == 1
    assert again.last_step() == 2
