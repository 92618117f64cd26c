"""Text from a trained model: a run's folder, or a Hugging Face folder of a GPT-2.

    python launch/generate.py runs/demo --prompt "def "
    python launch/generate.py runs/demo --prompt "import " --samples 3 --temperature 0.7 --top_p 0.9 --seed 5
    python launch/generate.py exported/first --temperature 0 --no_repeat_ngram_size 4

The text appears as it comes, on the standard output; how fast it came, on the standard error. Keys and values of what has been read are
kept, so that a token costs one token's work; beyond the model's context its window slides, and is read anew with each move.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# As in launch/pretrain.py: this script's folder is not where its modules are.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.config.flags import Parser, real_number, whole_number
from launch.config.hardware import device_type
from launch.errors import UsageError, run_command, say
from launch.trained_model.flags import DTYPES, add_source_flags, check_choice, check_dtype, torch_dtype
from launch.trained_model.load import Source, open_trained

if TYPE_CHECKING:
    import torch

    from launch.trained_model.load import Trained
    from model.presets import GPTConfig
    from model.sampling import NextLogits, Sampling

ENGINES = ("plain", "deepspeed")
MAX_PROMPT_BYTES = 2**26
#: What keys and values of several samples may take; of gpt2 (124 M) 14 samples.
ROOM_BYTES = 2**30


def build_parser() -> Parser:
    """The flags of `launch/generate.py`."""
    positive = whole_number(1)
    parser = Parser(
        prog="python launch/generate.py",
        description="Text from a trained model, as it comes.",
        epilog='Example: python launch/generate.py runs/demo --prompt "def " --temperature 0.7 --samples 3',
        allow_abbrev=False,
    )
    add_source_flags(parser)
    parser.add_argument("--data", metavar="DIR", help="of a run, where its corpus is now, which has the tokenizer (where it was)")
    what = parser.add_argument_group("what is written")
    what.add_argument("--prompt", metavar="TEXT", help="what the text begins with (nothing: a document from its beginning)")
    what.add_argument("--prompt_file", metavar="FILE", help="a file with the prompt, UTF-8; - is the standard input")
    what.add_argument("--document_start", action="store_true", help="the prompt begins a document: an end of text goes before it")
    what.add_argument("--max_new_tokens", type=positive, default=100, metavar="N", help="tokens of a sample, at most (100)")
    what.add_argument("--ignore_eos", action="store_true", help="go on where a text ends, up to --max_new_tokens")
    what.add_argument("--samples", type=whole_number(1, 10_000), default=1, metavar="N", help="texts that are written (1)")
    how = parser.add_argument_group("how a token is chosen")
    how.add_argument("--temperature", type=real_number(0), default=0.8, help="divides the logits; 0 takes the likeliest token (0.8)")
    how.add_argument("--top_k", type=whole_number(0), default=50, metavar="K", help="only the K likeliest tokens; 0: all (50)")
    how.add_argument("--top_p", type=real_number(0, 1, above=True), metavar="P", help="only the likeliest tokens that sum up to P (all)")
    how.add_argument(
        "--no_repeat_ngram_size", type=whole_number(0), default=0, metavar="N", help="no N tokens in a row occur twice; 0: off"
    )
    how.add_argument("--seed", type=whole_number(0, 2**62), default=1, help="of the first sample, the next one's is one more (1)")
    by = parser.add_argument_group("what computes it")
    by.add_argument("--engine", default="plain", metavar="NAME", help="plain, or deepspeed: DeepSpeed's inference kernels, on CUDA (plain)")
    by.add_argument("--dtype", default="fp32", metavar="NAME", help=f"the weights while it computes: {', '.join(DTYPES)} (fp32)")
    by.add_argument("--no_kv_cache", action="store_true", help="read the whole text anew for each token; the same tokens, slower")
    by.add_argument(
        "--slide",
        type=positive,
        default=1,
        metavar="N",
        help="tokens by which a full context moves on: more forgets more, and is faster (1)",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a sample, when all are there, in place of the text as it comes"
    )
    parser.add_argument("--quiet", action="store_true", help="no notes, and no figures at the end")
    return parser


def main() -> int:
    """Load, then write."""
    flags = build_parser().parse(sys.argv[1:])
    check_choice("engine", flags.engine, ENGINES)
    check_dtype(flags)
    if flags.engine == "deepspeed":
        if device_type() != "cuda":
            raise UsageError("--engine deepspeed: its kernels are for CUDA GPUs, and this machine has none; leave it out")
        if flags.no_kv_cache:
            raise UsageError("--engine deepspeed and --no_kv_cache: its kernels always keep what they have read; leave out one of the two")
    prompt = _prompt(flags)
    source = open_trained(flags.source, checkpoint=flags.checkpoint, data=flags.data, allow_pickle=flags.allow_pickle)
    ids = _prompt_ids(flags, source, prompt)
    if flags.slide > source.config.seq_len:
        raise UsageError(f"--slide {flags.slide}: the model's context is {source.config.seq_len} tokens; give that or less")
    if flags.engine == "deepspeed" and flags.ignore_eos and source.config.document_end is not None:
        raise UsageError(
            "--engine deepspeed --ignore_eos: this model keeps documents apart, and these kernels do not; leave out one of them"
        )
    trained = source.load()
    next_logits, device = _engine(flags, trained)
    _write(flags, trained, prompt, ids, next_logits, device)
    return 0


def _prompt(flags: argparse.Namespace) -> str:
    if flags.prompt is not None and flags.prompt_file is not None:
        raise UsageError("--prompt and --prompt_file both say what the text begins with; give one of them")
    if flags.prompt_file is None:
        prompt: str = flags.prompt or ""
        if any("\ud800" <= char <= "\udfff" for char in prompt):  # what Python makes of bytes that are no character
            raise UsageError("--prompt: is not UTF-8; give text")
        return prompt
    name = "the standard input" if flags.prompt_file == "-" else flags.prompt_file
    try:
        if flags.prompt_file == "-":
            data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        else:
            with open(flags.prompt_file, "rb") as stream:
                data = stream.read(MAX_PROMPT_BYTES + 1)
        if len(data) > MAX_PROMPT_BYTES:
            raise UsageError(f"--prompt_file {name}: more than {MAX_PROMPT_BYTES >> 20} MiB, of which a model reads a few kB; give its end")
        return data.decode("utf-8")
    except OSError as reason:
        raise UsageError(f"--prompt_file {name}: cannot be read ({reason.strerror}); give a text file") from None
    except UnicodeDecodeError as reason:
        raise UsageError(f"--prompt_file {name}: is not UTF-8 (byte {reason.start}); give a text file") from None


def _prompt_ids(flags: argparse.Namespace, source: Source, prompt: str) -> list[int]:
    """The prompt's ids; an end of text, after which a document begins, where there is nothing else."""
    if source.tokenizer is None:
        raise UsageError(f"{source.folder}: without a tokenizer its ids mean no text: {source.no_tokenizer}")
    ids = [int(token) for token in source.tokenizer.encode(prompt)]
    wrong = [token for token in ids if token >= source.config.vocab_size]
    if wrong:
        raise UsageError(f"{source.folder}: its tokenizer gives id {wrong[0]}, and the model has {source.config.vocab_size:,}; they differ")
    if flags.document_start or not ids:
        if source.eot_id is None:
            if not ids:
                raise UsageError("the prompt is empty, and this model has no end of text to begin after; give --prompt TEXT")
            raise UsageError("--document_start: this model has no end of text; leave it out")
        ids = [source.eot_id, *ids]
    if len(ids) > source.config.seq_len and not flags.quiet:
        say(f"note: the prompt has {len(ids):,} tokens, of which the model reads the last {source.config.seq_len:,}", sys.stderr)
    return ids


def _engine(flags: argparse.Namespace, trained: Trained) -> tuple[NextLogits, torch.device]:
    """What gives the next token's logits, and where it computes."""
    import torch

    from model.sampling import Cached, Recomputing

    device = torch.device(device_type())
    model = trained.model.to(device, torch_dtype(flags.dtype))
    if flags.engine == "deepspeed":
        from launch.trained_model.inference import DeepSpeedInference

        return DeepSpeedInference(model, flags.slide, rows=flags.samples), device
    if flags.no_kv_cache:
        return Recomputing(lambda tokens: model(tokens.to(device)), trained.config.seq_len, flags.slide), device
    return Cached(model, flags.slide), device


def _write(flags: argparse.Namespace, trained: Trained, prompt: str, ids: list[int], next_logits: NextLogits, device: torch.device) -> None:
    """The samples, the first one as it comes and the others after it."""
    from launch.trained_model.streaming import TextStream

    assert trained.tokenizer is not None
    seeds = [flags.seed + number for number in range(flags.samples)]
    made: list[list[int]] = [[] for _ in seeds]
    texts, shown = [""] * len(seeds), -1
    streams = [TextStream(trained.tokenizer, ids) for _ in seeds]
    over = [False] * len(seeds)

    def show() -> None:
        """What is new of the sample on show, and of those after it that are over."""
        nonlocal shown
        if flags.json:
            return
        if shown < 0:
            _out(_heading(0, seeds) + prompt)
            shown = 0
        while True:
            _out(texts[shown])
            texts[shown] = ""
            if not over[shown] or shown == len(seeds) - 1:
                return
            shown += 1
            _out("\n" + _heading(shown, seeds) + prompt)

    show()
    start = time.perf_counter()
    for row, token in _tokens(flags, trained, ids, next_logits, seeds):
        if token is None:
            texts[row] += streams[row].rest()
            over[row] = True
        else:
            made[row].append(token)
            texts[row] += streams[row].add(token)
        show()
    seconds = time.perf_counter() - start
    tokens = sum(map(len, made))
    figures = {"tokens": tokens, "seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds, 1)}
    if flags.json:
        # All that the text depends on, so that it can be written again.
        how = {"model": str(trained.folder), "checkpoint": trained.source.checkpoint_name}
        how |= {
            name: getattr(flags, name) for name in ("temperature", "top_k", "top_p", "no_repeat_ngram_size", "slide", "dtype", "engine")
        }
        for number, seed in enumerate(seeds):
            reason = "length" if len(made[number]) == flags.max_new_tokens else "end of text"
            own = {"sample": number + 1, "seed": seed, "prompt": prompt, "text": texts[number], "ids": made[number], "ended_by": reason}
            say(json.dumps(own | {"prompt_tokens": len(ids), **how, **figures}))
    else:
        _out("\n")
    if not flags.quiet:
        engine = "DeepSpeed's kernels" if flags.engine == "deepspeed" else "no KV cache" if flags.no_kv_cache else "KV cache"
        samples = "1 sample" if len(seeds) == 1 else f"{len(seeds)} samples"
        say(
            f"{samples}, {tokens:,} tokens in {seconds:.2f} s: {tokens / seconds:,.1f} tokens/s "
            f"({trained.name}, prompt of {len(ids):,} tokens, {device.type}, {flags.dtype}, {engine})",
            sys.stderr,
        )


def _tokens(
    flags: argparse.Namespace, trained: Trained, ids: list[int], next_logits: NextLogits, seeds: list[int]
) -> Iterator[tuple[int, int | None]]:
    """(sample, its next token), and (sample, None) where one is over; an end of text is the last token, and no text."""
    import torch

    from model.sampling import stream

    end = None if flags.ignore_eos else trained.eot_id
    at_once = _rows_at_once(flags, trained.config)
    with torch.inference_mode():
        for first in range(0, len(seeds), at_once):
            generators = [torch.Generator().manual_seed(seed) for seed in seeds[first : first + at_once]]
            going = set(range(len(generators)))
            try:
                for drawn in stream(next_logits, ids, flags.max_new_tokens, _sampling(flags), generators, end):
                    for row, token in enumerate(drawn):
                        if token is None:
                            continue
                        if token == end:
                            going.remove(row)
                            yield first + row, None
                        else:
                            yield first + row, token
            except ValueError as reason:  # weights that are too large for the dtype
                raise UsageError(f"{trained.name}: {reason} in {flags.dtype}; try --dtype fp32, or an earlier --checkpoint") from None
            for row in sorted(going):
                yield first + row, None


def _rows_at_once(flags: argparse.Namespace, config: GPTConfig) -> int:
    """How many samples are written at the same time: as many as ROOM_BYTES has room for."""
    if flags.engine == "deepspeed":  # which makes room for all
        return int(flags.samples)
    # Keys and values of every block, or the logits of the whole window, fp32.
    row = 4 * config.seq_len * (config.padded_vocab_size if flags.no_kv_cache else 2 * config.n_layer * config.d_model)
    return max(1, min(flags.samples, ROOM_BYTES // row))


def _sampling(flags: argparse.Namespace) -> Sampling:
    from model.sampling import Sampling

    return Sampling(flags.temperature, flags.top_k or None, flags.top_p, flags.no_repeat_ngram_size or None)


def _heading(number: int, seeds: list[int]) -> str:
    return f"--- sample {number + 1} of {len(seeds)}, seed {seeds[number]}\n" if len(seeds) > 1 else ""


def _out(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


if __name__ == "__main__":
    run_command(main)
