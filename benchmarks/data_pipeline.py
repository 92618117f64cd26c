"""From files to shards, against the tokenizer alone, against `datasets.map`, and on two workers; and the start on a large corpus.

    python benchmarks/data_pipeline.py        # gpt2's ranks, which must be in tiktoken's cache; five minutes on two cores

Each round times, one after the other: the tokenizer's own `encode_to_numpy` over all texts, in memory; `prepare.py --workers 1`, whole:
the tokenizer is loaded, the files are read, the shards, their hashes and the manifest are on the disk; and the way nanoGPT prepares a
corpus (`datasets.map` with `encode_ordinary`, then ids batch by batch into a memory map), on one process, without its reading of the texts.
Every MB/s is bytes of UTF-8 text. Then the same files COPIES times, by one worker and by two, in turns. Last the seconds from
`open_corpus` to the first batch of 8 x 1,025 tokens, on a corpus of 2,000,000,000 tokens in 20 shards that are holes on the disk: what
is timed is what does not read tokens.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import report
from benchmarks.report import Row

QUICK = ("--rounds", "2", "--copies", "2")

if TYPE_CHECKING:
    from data_pipeline.tokenizer import Tiktoken


def rows(record: dict[str, Any]) -> list[Row]:
    start = record["start"]
    return [
        Row("prepare.py / encode_to_numpy in memory, MB/s, one worker", f"{record['ratio_to_encode_to_numpy']:.2f}"),
        Row("prepare.py / datasets.map as nanoGPT, MB/s", f"{record['ratio_to_datasets_map']:.2f}"),
        Row("prepare.py, two workers / one, MB/s", f"{record['ratio_of_two_workers']:.2f}"),
        Row("open_corpus to the first batch of 2,000,000,000 tokens", f"{start['median_ms']:.1f} ms"),
    ]


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--source", default="stdlib", help="text (stdlib)")
    parser.add_argument("--tokenizer", default="r50k_base", help="encoding of tiktoken (r50k_base, the ranks of GPT-2)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each comparison (7)")
    parser.add_argument("--copies", type=int, default=16, help="how often the source is repeated for one worker against two (16)")
    arguments = parser.parse_args()
    from benchmarks.report import append
    from data_pipeline.errors import DataError
    from data_pipeline.sources import open_sources
    from data_pipeline.tokenizer import Tiktoken

    try:
        tokenizer = Tiktoken.from_cache(arguments.tokenizer)
        (source,), _ = open_sources([arguments.source])
    except DataError as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    texts = [text for _, text in source.documents() if isinstance(text, str)]
    size = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{arguments.source}: {len(texts):,} documents, {size:,.1f} MB, tokenizer {arguments.tokenizer}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        one = ["--source", arguments.source, "--tokenizer", arguments.tokenizer, "--workers", "1"]
        rates = _in_turns(
            {
                "encode_to_numpy in memory": lambda: _encode(tokenizer, texts),
                "prepare.py, one worker": lambda: _prepare(folder, one),
                "datasets.map as nanoGPT": lambda: _map(tokenizer, texts, folder),
            },
            arguments.rounds,
            size,
        )
        results: dict[str, Any] = {"source": arguments.source, "tokenizer": arguments.tokenizer, "megabytes": size, "rates": rates}
        results["ratio_to_encode_to_numpy"] = _ratio(rates, "prepare.py, one worker", "encode_to_numpy in memory")
        results["ratio_to_datasets_map"] = _ratio(rates, "prepare.py, one worker", "datasets.map as nanoGPT")
        copies = folder / "copies"
        copies.mkdir()
        for copy in range(arguments.copies):
            for number, text in enumerate(texts):
                (copies / f"{copy:03d}-{number:05d}.txt").write_bytes(text.encode())
        many = ["--source", str(copies), "--tokenizer", arguments.tokenizer, "--workers"]
        rates = _in_turns(
            {f"{n} worker{'s' if n > 1 else ''}": lambda n=n: _prepare(folder, [*many, str(n)]) for n in (1, 2)},
            max(3, arguments.rounds // 2),
            size * arguments.copies,
        )
        results["rates"] |= rates
        results["ratio_of_two_workers"] = _ratio(rates, "2 workers", "1 worker")
        results["start"] = _start(folder, arguments.rounds)
    if not arguments.no_record:
        append("data_pipeline", results, "cpu")
    return 0


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


def _start(folder: Path, rounds: int) -> dict[str, float]:
    """From `open_corpus` to the first batch, after one round that is not counted."""
    from benchmarks.report import spread
    from data_pipeline.loader import Loader
    from data_pipeline.sampler import GlobalSampler
    from data_pipeline.shards import open_corpus
    from tests.helpers import sparse_corpus

    place, seconds = sparse_corpus(folder / "large"), []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        corpus = open_corpus(place)
        sampler = GlobalSampler([corpus.train.windows(1024)], 1, corpus.fingerprint)
        loader = Loader(corpus.train, sampler, 1024, corpus.vocab_size, 0, 1, "cpu")
        (batch,) = loader.micro_batches(0, 8, 1)
        seconds.append(time.perf_counter() - started)
        assert batch.shape == (8, 1025)
    print(f"start: open_corpus to first batch on {corpus.train.n_tokens:,} tokens: {statistics.median(seconds[1:]):.4f} s", flush=True)
    return spread(seconds[1:])


def _in_turns(sides: dict[str, Callable[[], None]], rounds: int, megabytes: float) -> dict[str, dict[str, float]]:
    """MB/s of each side, timed in turns after one round that is not counted, with the table on the terminal."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds + 1):
        for name, run in sides.items():
            started = time.perf_counter()
            run()
            if round_:
                seconds[name].append(time.perf_counter() - started)
    rates = {}
    print(f"{'':28}{'MB/s':>8}   quartiles of {rounds} rounds")
    for name, times in seconds.items():
        lower, median, upper = (megabytes / value for value in statistics.quantiles(times, n=4))
        rates[name] = {"median": median, "lower_quartile": upper, "upper_quartile": lower, "seconds": times}
        print(f"{name:28}{median:8.1f}   {upper:.1f} to {lower:.1f}", flush=True)
    return rates


def _ratio(rates: dict[str, dict[str, Any]], name: str, against: str) -> float:
    """The median over the rounds of how many times faster `name` was in that round."""
    pairs = zip(rates[against]["seconds"], rates[name]["seconds"], strict=True)
    ratio = statistics.median(other / mine for other, mine in pairs)
    print(f"{name} against {against}: {ratio:.2f} times", flush=True)
    return ratio


if __name__ == "__main__":
    sys.exit(main())
