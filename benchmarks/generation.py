"""Text from a model: with the KV cache, without it, and by transformers' `generate`.

    python benchmarks/generation.py                                   # micro, 100 tokens: under a minute on two cores
    python benchmarks/generation.py --preset gpt2 --dtype fp16        # on a GPU

In turns, each round one text of each side: the same random weights, prompt and seed, so that the tokens must be the same too. Seconds are
of the text alone, not of loading. transformers samples by the same rules (temperature 0.8, the 50 likeliest), with draws of its own.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import report
from benchmarks.report import Row

QUICK = ("--rounds", "3")
VOCAB_SIZE = 8192
CACHED = "KV cache"
RECOMPUTED = "no KV cache"
BARS = {RECOMPUTED: "at least 3"}


def rows(record: dict[str, Any]) -> list[Row]:
    what = f"{record['new_tokens']} tokens of {record['preset']}, {record['dtype']}"
    return [
        Row(f"{what}: {side} / {CACHED}", f"{one['ratio']:.2f}", one["quartiles"], BARS.get(side, ""))
        for side, one in record["against"].items()
    ]


def sides(arguments: Any, device: Any) -> dict[str, Callable[[], list[int]]]:
    """What writes the text, by name: each call writes it once and returns its tokens."""
    import torch

    from launch.trained_model.flags import DTYPES
    from model.cache import KVCache
    from model.gpt import GPT
    from model.hf import hf_config, to_hf_state_dict
    from model.presets import PRESETS, GPTConfig
    from model.sampling import Sampling, recomputed, stream

    config = GPTConfig(**vars(PRESETS[arguments.preset].shape), vocab_size=VOCAB_SIZE)
    model = GPT(config).eval().requires_grad_(False).to(device, getattr(torch, DTYPES[arguments.dtype]))
    prompt, count = [1, 2, 3, 4], arguments.new_tokens

    def ours(next_logits: Any) -> list[int]:
        return list(stream(next_logits, prompt, count, Sampling(0.8, 50), torch.Generator().manual_seed(1)))

    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(GPT2Config.from_dict(hf_config(config))).eval()
    theirs.load_state_dict(to_hf_state_dict(model.state_dict(), config))
    theirs.to(device, getattr(torch, DTYPES[arguments.dtype]))
    ids = torch.tensor([prompt], device=device)
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": True, "temperature": 0.8, "top_k": 50, "pad_token_id": 0}

    def transformers() -> list[int]:
        torch.manual_seed(1)
        return theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()

    found = {
        CACHED: lambda: ours(KVCache(model)),
        RECOMPUTED: lambda: ours(recomputed(lambda tokens: model(tokens.to(device)), config.seq_len)),
        "transformers": transformers,
    }
    return found


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--preset", default="micro", help="model size (micro)")
    parser.add_argument("--dtype", default="fp32", help="fp32, bf16 or fp16 (fp32)")
    parser.add_argument("--new_tokens", type=int, default=100, help="tokens of a text, behind a prompt of 4 (100)")
    parser.add_argument("--rounds", type=int, default=15, help="texts of each side that are counted (15)")
    arguments = parser.parse_args()
    import torch

    from launch.config.hardware import device_type

    device = torch.device(device_type())
    seconds: dict[str, list[float]] = {}
    with torch.inference_mode():
        of_sides = sides(arguments, device)
        for number in range(arguments.rounds + 1):
            texts = {}
            for side, write in of_sides.items():
                start = time.perf_counter()
                texts[side] = write()
                spent = time.perf_counter() - start
                if number:  # the first round is not counted
                    seconds.setdefault(side, []).append(spent)
            assert all(len(text) == arguments.new_tokens for text in texts.values())
            if arguments.dtype == "fp32" and texts[CACHED] != texts[RECOMPUTED]:
                raise SystemExit("the cache has changed the text")
    against = {}
    for side, times in seconds.items():
        median = statistics.median(times)
        print(f"{side:20} {1e3 * median:8.1f} ms a text, {arguments.new_tokens / median:8.1f} tokens/s")
        if side != CACHED:
            against[side] = dict(zip(("ratio", "quartiles"), report.ratio(times, seconds[CACHED]), strict=True))
            print(f"{'':20} {against[side]['ratio']:.2f} times as long as with the cache")
    if not arguments.no_record:
        results = {
            "preset": arguments.preset,
            "dtype": arguments.dtype,
            "new_tokens": arguments.new_tokens,
            "threads": torch.get_num_threads(),
        }
        results |= {"seconds": {side: report.spread(times) for side, times in seconds.items()}, "against": against}
        report.append("generation", results, report.device_name() if device.type == "cuda" else "cpu")
    return 0


if __name__ == "__main__":
    sys.exit(main())
