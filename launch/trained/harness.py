"""Tasks of lm-evaluation-harness (Gao et al., https://github.com/EleutherAI/lm-evaluation-harness) on a trained model.

    pip install -e ".[harness]" -c constraints.txt
    python launch/score.py runs/demo --tasks lambada_openai --limit 100

The harness brings the questions and the metrics; here is what it asks of a model: how likely a text is after another, and how one goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM

from launch.run.errors import UsageError, nearest, one_line
from launch.run.hardware import device_type
from launch.trained.flags import torch_dtype
from model.sampling import Cached, Sampling, stream

if TYPE_CHECKING:
    from launch.trained.load import Trained

#: Tokens of a pass, about, padding included.
PASS_TOKENS = {"cpu": 2048, "cuda": 16384}
MAX_NEW_TOKENS = 256  # where a task names no other length


class HarnessModel(TemplateLM):  # type: ignore[misc]  # the harness is an extra, and without it of no type
    """A trained model as the harness wants it: requests in, logarithms of probabilities or texts out, in the same order."""

    def __init__(self, trained: Trained, dtype: str, batch_size: int | None, quiet: bool):
        super().__init__()
        assert trained.tokenizer is not None
        self._device = torch.device(device_type())
        self._model = trained.model.to(self._device, torch_dtype(dtype))
        self._tokenizer_of_corpus, self._config, self._eot_id, self._quiet = trained.tokenizer, trained.config, trained.eot_id, quiet
        self._batch_size = batch_size
        self.cut = 0  # texts that were longer than the model's context, and lost their beginning

    @property
    def eot_token_id(self) -> int:
        """What a text begins after; id 0 where the corpus has no end of text."""
        return 0 if self._eot_id is None else self._eot_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return [int(token) for token in self._tokenizer_of_corpus.encode(string)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """ln P of each whole text: every token once, in windows side by side, as the harness cuts them."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        found = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self._config.seq_len, 1)
            parts = [(("", text), *make_disjoint_window(window)) for window in windows]
            found.append(sum(value for value, _ in self._loglikelihood_tokens(parts, disable_tqdm=True)))
        return found

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """(ln P(continuation | context), whether it is the likeliest one) of each ((texts), context ids, continuation ids).

        A context that is too long loses its beginning, as in the harness's own models.
        """
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        rows = [(context + continuation)[-(self._config.seq_len + 1) :] for _, context, continuation in requests]
        self.cut += sum(len(context) + len(continuation) > len(row) for (_, context, continuation), row in zip(requests, rows, strict=True))
        # Rows of like length share a pass; the longest first, so that too little memory shows at once.
        order = sorted((index for index, (_, _, continuation) in enumerate(requests) if continuation), key=lambda index: -len(rows[index]))
        with self._progress(len(order), disable_tqdm) as done:
            for batch in self._batches(order, rows):
                longest = len(rows[batch[0]]) - 1
                # Padded behind: a causal model does not see it.
                tokens = torch.tensor([rows[index][:-1] + [0] * (longest + 1 - len(rows[index])) for index in batch])
                logits = self._model(tokens.to(self._device))  # (B, T, V)
                for index, of_row in zip(batch, logits, strict=True):
                    targets = torch.tensor(requests[index][2][-(len(rows[index]) - 1) :], device=self._device)
                    end = len(rows[index]) - 1
                    logprobs = F.log_softmax(of_row[end - len(targets) : end].float(), dim=-1)  # (continuation, V)
                    likely = logprobs.gather(1, targets[:, None]).sum()
                    found[index] = (float(likely), bool((logprobs.argmax(-1) == targets).all()))
                done(len(batch))
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """How each context goes on, up to the first of its task's stop words."""
        return [self._continuation(*request.args) for request in requests]

    def _continuation(self, context: str, options: dict[str, Any]) -> str:
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        length = int(options.get("max_gen_toks") or options.get("max_new_tokens") or MAX_NEW_TOKENS)
        temperature = float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0
        sampling = Sampling(temperature, options.get("top_k"), options.get("top_p"))
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        # Room for what is to come, as the harness's own models leave it: the context loses its beginning, once.
        room = max(1, self._config.seq_len - length)
        self.cut += len(prompt) > room
        prompt = prompt[-room:]
        ids: list[int] = []
        generator = torch.Generator().manual_seed(1)
        for (token,) in stream(Cached(self._model), prompt, length, sampling, [generator], self._eot_id):
            if token is None or token == self._eot_id:
                break
            ids.append(token)
            text = self._tokenizer_of_corpus.decode(ids)
            if found := [place for stop in stops if stop and (place := text.find(stop)) >= 0]:
                return text[: min(found)]
        return self._tokenizer_of_corpus.decode(ids)

    def _batches(self, order: list[int], rows: list[list[int]]) -> Iterator[list[int]]:
        start = 0
        while start < len(order):
            fitting = PASS_TOKENS.get(self._device.type, PASS_TOKENS["cpu"]) // max(1, len(rows[order[start]]) - 1)
            size = self._batch_size or max(1, fitting)
            yield order[start : start + size]
            start += size

    @contextlib.contextmanager
    def _progress(self, total: int, disabled: bool) -> Iterator[Any]:
        if self._quiet or disabled or not sys.stderr.isatty():
            yield lambda count: None
            return
        from tqdm import tqdm

        with tqdm(total=total, unit="text", dynamic_ncols=True, leave=False) as bar:
            yield bar.update


def run_tasks(trained: Trained, flags: argparse.Namespace) -> dict[str, Any]:
    """The tasks that the flags of `launch/score.py` name.

    Raises:
        UsageError: a task that there is not, or one whose texts cannot be had.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    names = [name.strip() for name in flags.tasks.split(",") if name.strip()]
    if not names:
        raise UsageError("--tasks is empty; give names, separated by commas")
    # What it prints is not what is asked for; bars and warnings go the way of our own notes.
    aside = io.StringIO() if flags.quiet else sys.stderr
    with contextlib.redirect_stdout(aside), contextlib.redirect_stderr(aside):
        try:
            manager = TaskManager(include_path=flags.tasks_dir)
        except Exception as reason:  # whatever its YAML reader raises
            raise UsageError(f"--tasks_dir {flags.tasks_dir}: cannot be read ({one_line(str(reason))[:200]})") from None
        for name in names:
            if not manager.match_tasks([name]):
                raise UsageError(f"--tasks {name}: no such task{nearest(name, manager.all_tasks)}; lm-eval ls tasks lists them")
        model = HarnessModel(trained, flags.dtype, flags.batch_size, flags.quiet)
        try:
            found = lm_eval.simple_evaluate(
                model=model,
                tasks=names,
                num_fewshot=flags.num_fewshot,
                limit=flags.limit,
                task_manager=manager,
                log_samples=False,
                bootstrap_iters=1000,
            )
        except (OSError, ValueError, ImportError) as reason:  # texts that cannot be fetched, packages that a task wants
            raise UsageError(f"--tasks {flags.tasks}: {type(reason).__name__}: {one_line(str(reason))[:300]}") from None
    return {
        "model": str(trained.folder),
        "checkpoint": trained.source.checkpoint_name,
        "dtype": flags.dtype,
        "step": trained.source.step,
        "limit": flags.limit,
        "lm_eval": lm_eval.__version__,
        "cut": model.cut,
        "tasks": {name: _task(name, found) for name in found["results"]},
    }


def _task(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """A task's metrics: the harness calls them `acc,none` and `acc_stderr,none`."""
    values = {key: value for key, value in found["results"][name].items() if isinstance(value, (int, float)) and "," in key}
    metrics = {}
    for key, value in values.items():
        metric, _, filtered = key.partition(",")
        if not metric.endswith("_stderr"):
            label = metric if filtered == "none" else f"{metric} ({filtered})"
            error = values.get(f"{metric}_stderr,{filtered}")
            metrics[label] = {"value": float(value), "stderr": None if error is None else float(error)}
    return {
        "metrics": metrics,
        "num_fewshot": found.get("n-shot", {}).get(name, 0),
        "samples": found.get("n-samples", {}).get(name, {}).get("effective", 0),
    }
