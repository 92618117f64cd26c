"""A damaged checkpoint is never loaded: the newest good one is, the others are named and stay. No file of one runs code."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.errors import UsageError
from launch.formats.checkpoint_files import complete_checkpoints, read_state
from launch.trained_model.load import open_trained
from tests.distributed.launched import TINY, LaunchedRun
from tests.helpers import reseal

#: The DeepSpeed JSONs of the runs that are damaged, on two ranks: every form of file that a checkpoint here can have.
KINDS = ("zero1_bf16", "zero0_fp32", "zero3_fp16", "zero_offload", "zero_one_adam")
AT_THE_GATE = "zero3_fp16"
CASES = {name: 60 if name == "zero1_bf16" else 25 for name in KINDS}


@pytest.fixture(scope="module")
def trained(request, two_ranks, corpus, tmp_path_factory) -> Callable[[str], tuple[list[str], Path, Path]]:
    """Of a kind: the flags of its runs, and two runs of other seeds, each with the checkpoints of steps 2, 4 and 6."""
    made: dict[str, tuple[list[str], Path, Path]] = {}

    def train(kind: str) -> tuple[list[str], Path, Path]:
        if kind not in made:
            runs = tmp_path_factory.mktemp(kind)
            flags = ["--deepspeed_config", f"ds_configs/{kind}.json", *TINY, "--data", str(corpus), "--global_batch_size", "4"]
            flags += ["--steps", "6", "--save_every", "2", "--eval_every", "0", "--keep", "9", "--runs_dir", str(runs)]
            for name, seed in (("a", "1"), ("b", "2")):
                two_ranks.train([*flags, "--run_name", name, "--seed", seed])
            made[kind] = flags, runs / "a", runs / "b"
        return made[kind]

    return train


def load_each(two_ranks, flags: list[str], runs: list[Path]) -> list[list[dict[str, Any]]]:
    """For each run what each of the two ranks found."""
    named = [*flags, "--run_name", "a"]
    by_rank = two_ranks.run("tests.distributed.checkpoint_jobs:load_each", flags=named, runs=list(map(str, runs)))
    return list(map(list, zip(*by_rank, strict=True)))


def contents(run: Path) -> collections.Counter[str]:
    """Every file of a run's checkpoints, by what it holds."""
    files = (path for path in (run / "checkpoints").rglob("*") if path.is_file())
    return collections.Counter(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)


def names(run: Path) -> dict[str, str]:
    """The files of the newest checkpoint, by name, with what each holds."""
    newest = run / "checkpoints" / "step-00000006"
    files = (path for path in newest.rglob("*") if path.is_file())
    return {str(path.relative_to(newest)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# --- 200 kinds of damage --------------------------------------------------------------------------------------------------------------


def damage(chance: random.Random, run: Path, other_run: Path) -> str:
    """Damage one checkpoint of `run`, mostly the newest; says what was done to which file."""
    checkpoint = run / "checkpoints" / chance.choice(["step-00000006", "step-00000006", "step-00000004"])
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)
    file = chance.choice(files)
    name = file.relative_to(checkpoint)
    another_step = chance.choice([step for step in (2, 4, 6) if f"{step:08d}" not in checkpoint.name])
    content = bytearray(file.read_bytes())

    def flip() -> None:
        for _ in range(chance.choice([1, 1, 8])):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(content)

    def edit(**values: Any) -> None:
        state = json.loads((checkpoint / "state.json").read_text())
        (checkpoint / "state.json").write_text(json.dumps(state | values, indent=2))

    def swap_ranks() -> None:
        optimizers = sorted((checkpoint / "engine").glob("*optim_states.pt")) or sorted(checkpoint.glob("engine/*.pt")) * 2
        first, second = optimizers[:2]
        a, b = first.read_bytes(), second.read_bytes()
        first.write_bytes(b)
        second.write_bytes(a)

    def replace_folder(source: Path) -> None:
        shutil.rmtree(checkpoint)
        shutil.copytree(source, checkpoint)

    kinds: dict[str, Callable[[], Any]] = {
        "flip": flip,
        "flip again": flip,
        "truncate": lambda: os.truncate(file, chance.randrange(len(content))),
        "zero": lambda: file.write_bytes(bytes(len(content))),
        "zero a page": lambda: file.write_bytes(content[: len(content) // 2] + bytes(4096) + content[len(content) // 2 + 4096 :]),
        "append": lambda: file.write_bytes(bytes(content) + b"\0"),
        "remove": file.unlink,
        "file of another step": lambda: shutil.copy(run / f"checkpoints/step-{another_step:08d}" / name, file),
        "file of another run": lambda: shutil.copy(other_run / "checkpoints" / checkpoint.name / name, file),
        "files of two ranks": swap_ranks,
        "folder of another step": lambda: replace_folder(run / f"checkpoints/step-{another_step:08d}"),
        "folder of another run": lambda: replace_folder(other_run / "checkpoints" / checkpoint.name),
        "edited state": lambda: edit(**chance.choice([{"step": 5}, {"tokens": 1}, {"samples": 7}, {"ranks": 1}, {"val_loss": 1.5}])),
        "state without digests": lambda: edit(files={}),
    }
    kind = chance.choice(sorted(kinds))
    kinds[kind]()
    return f"{kind}: {checkpoint.name}/{name}"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.gate if kind == AT_THE_GATE else pytest.mark.long) for kind in KINDS]
)
def test_no_damaged_checkpoint_is_loaded_and_an_older_good_one_is(kind, trained, two_ranks, tmp_path):
    flags, run, other_run = trained(kind)
    # The content of each checkpoint, from runs in which it is the newest.
    cut = [Path(shutil.copytree(run, tmp_path / f"cut-{step}")) for step in (2, 4, 6)]
    for folder, step in zip(cut, (2, 4, 6), strict=True):
        for checkpoint in complete_checkpoints(folder / "checkpoints"):
            if read_state(checkpoint)["step"] > step:
                shutil.rmtree(checkpoint)
    good = [[rank["content"] for rank in ranks] for ranks in load_each(two_ranks, flags, cut)]
    assert len({content for of_step in good for content in of_step}) >= 3
    of_step = dict(zip((2, 4, 6), good, strict=True))

    chance = random.Random(kind)
    cases, said = [], []
    for number in range(CASES[kind]):
        cases.append(Path(shutil.copytree(run, tmp_path / f"case-{number}")))
        said.append(damage(chance, cases[-1], other_run))
    before = [contents(case) for case in cases]
    passed_over = 0
    for case, what, ranks, files in zip(cases, said, load_each(two_ranks, flags, cases), before, strict=True):
        assert [rank["content"] for rank in ranks] == of_step[ranks[0]["step"]], what
        step = ranks[0]["step"]
        if ranks[0]["log"]:
            (line,) = ranks[0]["log"]
            assert step == 4 and str(case / "checkpoints/step-00000006") in line, what
            passed_over += 1
        else:  # an older one is damaged; or a file has the same content as before, of the state but for white space
            assert step == 6 and (names(case) == names(run) or "state.json" in what), what
        assert contents(case) == files, f"{what}: something was deleted or changed"
    assert passed_over > len(cases) / 3


def test_all_ranks_agree_and_all_damaged_is_refused_with_each_reason(trained, two_ranks, tmp_path):
    flags, run, _ = trained("zero1_bf16")
    cases = [Path(shutil.copytree(run, tmp_path / f"case-{number}")) for number in range(4)]
    engine = "checkpoints/step-00000006/engine"
    for rank in (0, 1):  # one of the ranks reads it
        os.truncate(cases[rank] / engine / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", 1000)
    for checkpoint in complete_checkpoints(cases[2] / "checkpoints"):
        (checkpoint / "engine/mp_rank_00_model_states.pt").unlink()
    for checkpoint in complete_checkpoints(cases[3] / "checkpoints"):
        shutil.rmtree(checkpoint)
    found = load_each(two_ranks, flags, cases)
    assert [rank.get("step") for ranks in found for rank in ranks] == [4, 4, 4, 4, None, None, None, None]
    for rank in found[2]:
        for step, line in zip((6, 4, 2), rank["refused"][1:], strict=True):
            assert str(cases[2] / f"checkpoints/step-{step:08d}/engine/mp_rank_00_model_states.pt") in line


@pytest.mark.long
def test_a_restart_goes_on_from_the_older_checkpoint_and_keeps_the_damaged_one(trained, tmp_path):
    """As people start it, to its end: the steps are trained again, and what was damaged is kept under another name."""
    flags, run, _ = trained("zero1_bf16")
    case = Path(shutil.copytree(run, tmp_path / "a"))
    newest = case / "checkpoints" / "step-00000006"
    file = newest / "engine" / "mp_rank_00_model_states.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    again = [*flags[len(TINY) + 2 :], *f"--resume --seed 1 --deepspeed_config ds_configs/zero1_bf16.json --runs_dir {tmp_path}".split()]
    resumed = LaunchedRun(tmp_path, "a", 1, 2, again)
    assert resumed.wait() == 0, resumed.output()
    assert sum(str(file) in line for line in resumed.output().splitlines()) == 1
    assert [path.name for path in complete_checkpoints(case / "checkpoints")] == [f"step-0000000{step}" for step in (2, 4, 6)]
    assert (case / "checkpoints/step-00000006.unusable/engine/mp_rank_00_model_states.pt").read_bytes() == content
    losses = [[json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in (run, case)]
    # Bit for bit in one pool of ranks (test_resume.py); these are other processes, and bf16.
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


# --- names beside checkpoints ---------------------------------------------------------------------------------------------------------


def test_what_a_run_did_not_write_stays_through_saves_and_prunes(trained, two_ranks, tmp_path):
    from tests.test_checkpoint_files import FOREIGN

    flags, run, other_run = trained("zero1_bf16")
    case = Path(shutil.copytree(run, tmp_path / "a"))
    shutil.rmtree(case / "checkpoints/step-00000006")
    checkpoints, elsewhere = case / "checkpoints", tmp_path / "elsewhere"
    for number, name in enumerate(FOREIGN):
        place = checkpoints / name
        if number % 3 == 0:
            shutil.copytree(checkpoints / "step-00000004", place)
        elif number % 3 == 1:
            place.write_text("a note")
        else:
            place.symlink_to(checkpoints / "step-00000004")
    os.rename(checkpoints / "step-00000002", elsewhere)
    (checkpoints / "step-00000002").symlink_to(elsewhere)  # moved to another disk
    shutil.copytree(other_run / "checkpoints/step-00000002", checkpoints / "step-00000001")
    shutil.copytree(other_run / "checkpoints/step-00000002", checkpoints / "step-00000003")

    def foreign() -> dict[str, Any]:
        held = {}
        for name in (*FOREIGN, "step-00000001", "step-00000002", "step-00000003"):
            place = checkpoints / name
            for path in [place] if place.is_symlink() else sorted([place, *place.rglob("*")]):
                held[str(path)] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
        return held

    before = foreign()
    more = ["--runs_dir", str(tmp_path), "--run_name", "a", "--seed", "1", "--resume", "--steps", "12", "--keep", "1"]
    lines = two_ranks.train([*flags, *more])
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert foreign() == before
    own = {path.name for path in checkpoints.iterdir()} - set(FOREIGN)
    assert own == {"step-00000001", "step-00000002", "step-00000003", "step-00000012"}
    log = (case / "log.txt").read_text().splitlines()
    assert not [line for line in log if "warning" in line and "the learning rate goes" not in line]  # another length
    assert open_trained(case).step == 12


# --- hostile pickles ------------------------------------------------------------------------------------------------------------------


class Runs:
    """Unpickled, it makes a folder named `mark`."""

    def __init__(self, mark: str, function: Callable[..., Any] = os.mkdir, *arguments: Any):
        self.call = function, (arguments or (mark,))

    def __reduce__(self) -> Any:
        return self.call


class RunsByState(dict):  # type: ignore[type-arg]
    """The same from a dictionary's items and a state."""

    def __init__(self, mark: str):
        self.mark = mark

    def __reduce__(self) -> Any:
        return collections.OrderedDict, (), {"state": Runs(self.mark)}, None, iter([("key", Runs(self.mark))])


def _torch(value: Any, zipped: bool = True) -> Callable[[Path], None]:
    return lambda file: torch.save(value, file, _use_new_zipfile_serialization=zipped)


def _raw(value: Any, protocol: int) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(pickle.dumps(value, protocol))


def _in_archive(pickled: bytes) -> Callable[[Path], None]:
    """A file of torch's in whose archive the pickle is another."""

    def write(file: Path) -> None:
        torch.save({"module": {}}, file)
        with zipfile.ZipFile(file) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, content in members.items():
                archive.writestr(name, pickled if name.endswith("data.pkl") else content)

    return write


def hostile(mark: str) -> dict[str, Callable[[Path], None]]:
    """Writers of files that make a folder `mark` when they are unpickled."""
    text = struct.pack("<I", len(mark)) + mark.encode()
    code = f"__import__('os').mkdir({mark!r})"
    return {
        "reduce": _torch({"module": {}, "x": Runs(mark)}),
        "alone": _torch(Runs(mark)),
        "legacy": _torch({"module": {}, "x": Runs(mark)}, zipped=False),
        "eval": _torch({"module": Runs(mark, eval, code)}),
        "exec in a list": _torch([[[Runs(mark, exec, code)]]]),
        "state": _torch({"module": {}, "x": RunsByState(mark)}),
        "raw 0": _raw(Runs(mark), 0),
        "raw 2": _raw({"module": {}, "x": Runs(mark)}, 2),
        "raw 5": _raw({"module": {}, "x": Runs(mark)}, 5),
        "INST": _in_archive(b"(X" + text + b"ios\nmkdir\n."),
        "OBJ": _in_archive(b"(cos\nmkdir\nX" + text + b"o."),
        "STACK_GLOBAL": _in_archive(b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93X" + text + b"\x85R."),
        "getattr": _in_archive(b"\x80\x02cbuiltins\ngetattr\ncposix\nmkdir\nX\x08\0\0\0__call__\x86RX" + text + b"\x85R."),
    }


@pytest.mark.parametrize(
    "kind", [pytest.param("zero3_fp16", marks=pytest.mark.gate), pytest.param("zero_one_adam", marks=pytest.mark.long)]
)
def test_no_pickle_in_a_checkpoint_runs_code(kind, trained, two_ranks, tmp_path):
    """Sealed with good digests, in every file that a resume, an export, a score or a generation unpickles."""
    flags, run, _ = trained(kind)
    files = sorted(path.relative_to(run) for path in (run / "checkpoints/step-00000006").rglob("*.pt"))
    assert len(files) >= 3
    marks, cases, targets = [], [], []
    for number, form in enumerate(sorted(hostile(""))):
        for file in files:
            case = tmp_path / f"{number}-{file.name}"
            shutil.copytree(run, case)
            marks.append(tmp_path / f"mark-{len(marks)}")
            hostile(str(marks[-1]))[form](case / file)
            reseal(case / "checkpoints/step-00000006")
            cases.append(case)
            targets.append(case / file)
    for target, ranks in zip(targets, load_each(two_ranks, flags, cases), strict=True):
        assert [rank["step"] for rank in ranks] == [4, 4]
        assert str(target) in ranks[0]["log"][0]
    for case in cases:
        with contextlib.suppress(UsageError):  # it does not read all of the files
            open_trained(case, checkpoint="6").load_model()
    assert not [mark for mark in marks if mark.exists()]
    hostile(str(marks[0]))["reduce"](tmp_path / "unsafe.pt")
    torch.load(tmp_path / "unsafe.pt", weights_only=False)
    assert marks[0].exists(), "the form does nothing"


def test_only_one_place_unpickles():
    """nanoGPT's `meta.pkl` has an unpickler of its own that makes no object (data_pipeline/nanogpt.py)."""
    from tests.helpers import ROOT

    found = {
        file.relative_to(ROOT).as_posix()
        for folder in ("launch", "recipes", "model", "data_pipeline")
        for file in (ROOT / folder).rglob("*.py")
        if any(call in file.read_text() for call in ("torch.load(", "pickle.load", "pickle.Unpickler("))
    }
    assert found == {"launch/formats/tensor_files.py"}
