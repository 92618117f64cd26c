"""Preparing a corpus: against the tokenizer alone, against `datasets.map`, and with two workers.

    python benchmarks/data_pipeline.py        # needs gpt2's ranks in tiktoken's cache; five minutes on two cores

Each round times: the tokenizer's `encode_to_numpy` over all texts, in memory; the whole of `prepare.py --workers 1`, from loading the
tokenizer to shards, hashes and manifest on disk; and nanoGPT's way (`datasets.map` with `encode_ordinary`, then ids batch by batch into a
memory map) in one process, without reading the texts. Then the same files COPIES times, with one worker and with two.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import report
from launch.config.flags import whole_number

if TYPE_CHECKING:
    from data_pipeline.tokenizer import Tiktoken

QUICK = ("--rounds", "2", "--copies", "2")


def measure(arguments: argparse.Namespace) -> report.Measured:
    """Time all comparisons; one record."""
    from data_pipeline.sources import open_sources
    from data_pipeline.tokenizer import Tiktoken

    tokenizer = Tiktoken.from_library(arguments.tokenizer)
    (source,), _ = open_sources([arguments.source])
    texts = ["".join(text.blocks()) for text in source.documents()]
    size = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{arguments.source}: {len(texts):,} documents, {size:,.1f} MB, tokenizer {arguments.tokenizer}", flush=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as place:
        folder = Path(place)
        flags = ["--tokenizer", arguments.tokenizer, "--workers"]
        one: dict[str, Callable[[], Any]] = {
            "encode_to_numpy in memory": lambda: _encode(tokenizer, texts),
            "prepare.py, one worker": lambda: _prepare(folder, ["--source", arguments.source, *flags, "1"]),
            "datasets.map as nanoGPT": lambda: _map(tokenizer, texts, folder),
        }
        rates = _rates(one, arguments.rounds, size)
        copies = folder / "copies"
        copies.mkdir()
        for copy in range(arguments.copies):
            for number, text in enumerate(texts):
                (copies / f"{copy:03d}-{number:05d}.txt").write_bytes(text.encode())
        two: dict[str, Callable[[], Any]] = {
            name: functools.partial(_prepare, folder, ["--source", str(copies), *flags, name[0]]) for name in ("1 worker", "2 workers")
        }
        rates |= _rates(two, max(3, arguments.rounds // 2), size * arguments.copies)
    rows = [
        report.ratio_row(what, rates[slow]["seconds"], rates[fast]["seconds"])
        for what, fast, slow in (
            ("prepare.py / encode_to_numpy in memory, MB/s, one worker", "prepare.py, one worker", "encode_to_numpy in memory"),
            ("prepare.py / datasets.map as nanoGPT, MB/s", "prepare.py, one worker", "datasets.map as nanoGPT"),
            ("prepare.py, two workers / one, MB/s", "2 workers", "1 worker"),
        )
    ]
    details = {"source": arguments.source, "tokenizer": arguments.tokenizer, "megabytes": size, "rates": rates}
    yield rows, {"device": "cpu", **details}


def _encode(tokenizer: Tiktoken, texts: list[str]) -> None:
    for text in texts:
        tokenizer.library.encode_to_numpy(text, disallowed_special=())


def _prepare(folder: Path, arguments: list[str]) -> None:
    from data_pipeline import prepare

    out = folder / "out"
    status = prepare.main([*arguments, "--out", str(out), "--quiet"])
    assert status == 0, status
    shutil.rmtree(out)


def _map(tokenizer: Tiktoken, texts: list[str], folder: Path) -> None:
    import datasets

    datasets.disable_caching()
    datasets.disable_progress_bars()
    encoding, end = tokenizer.library, tokenizer.eot_id

    def ids_of(example: dict[str, Any]) -> dict[str, Any]:
        ids = [*encoding.encode_ordinary(example["text"]), end]
        return {"ids": ids, "len": len(ids)}

    made = datasets.Dataset.from_dict({"text": texts}).map(ids_of, remove_columns=["text"], num_proc=1)
    file, position, parts = folder / "map.bin", 0, min(64, len(made))
    out = np.memmap(file, dtype=np.uint16, mode="w+", shape=(int(np.sum(made["len"], dtype=np.int64)),))
    for index in range(parts):
        batch = np.concatenate(made.shard(parts, index, contiguous=True).with_format("numpy")["ids"])
        out[position : position + len(batch)] = batch
        position += len(batch)
    out.flush()
    file.unlink()


def _rates(sides: dict[str, Callable[[], Any]], rounds: int, megabytes: float) -> dict[str, dict[str, Any]]:
    """MB of text a second of each side, interleaved, with a line each on the terminal."""
    rates = {}
    for name, seconds in report.interleave(sides, rounds, 1).items():
        lower, median, upper = sorted(megabytes / value for value in statistics.quantiles(seconds, n=4))
        rates[name] = {"median": median, "lower_quartile": lower, "upper_quartile": upper, "seconds": seconds}
        print(f"{name}: {median:.1f} MB/s, quartiles {lower:.1f} to {upper:.1f}", flush=True)
    return rates


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--source", default="stdlib", help="text, as for prepare.py (%(default)s)")
    parser.add_argument("--tokenizer", default="r50k_base", help="encoding of tiktoken (%(default)s, the ranks of GPT-2)")
    parser.add_argument("--rounds", type=whole_number(2), default=7, help="rounds of each comparison (%(default)s)")
    parser.add_argument("--copies", type=whole_number(1), default=16, help="copies of the text, to compare workers (%(default)s)")
    report.run(__file__, parser, measure)


if __name__ == "__main__":
    main()
