"""The tokenizer of a Hugging Face folder, and whether a corpus was made with it. Imports no torch."""

from __future__ import annotations

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.shards import Corpus
from data_pipeline.tokenizer import HuggingFaceFolder, Tokenizer
from launch.formats.hf_folder import HFFolder

#: Ids of the corpus whose text both tokenizers are asked for.
COMPARED_IDS = 4096


def tokenizer_of_folder(hf: HFFolder) -> tuple[Tokenizer | None, str]:
    """The folder's tokenizer, or None and why there is none."""
    if not hf.has_tokenizer:
        return None, f"{hf.folder} holds no tokenizer"
    try:
        return HuggingFaceFolder(hf.folder, hf.end_of_text, str(hf.folder)), ""
    except DataError as reason:
        return None, str(reason)


def tokenizer_of_corpus(corpus: Corpus) -> tuple[Tokenizer | None, str]:
    """The corpus's tokenizer, or None and why there is none."""
    try:
        return Tokenizer.load(corpus.path, corpus.manifest["tokenizer"]), ""
    except DataError as reason:
        return None, str(reason)


def difference(corpus: Corpus, own: Tokenizer, of_model: Tokenizer) -> str | None:
    """Where two tokenizers disagree about the beginning of a corpus's validation text, one line; None where they do not."""
    count = min(COMPARED_IDS, corpus.val.windows(1))
    ids = corpus.val.read(np.arange(count), 1)[:, 0]
    ids = ids[ids != corpus.eot_id] if corpus.eot_id is not None else ids
    if ids.size and int(ids.max()) >= of_model.vocab_size:
        return f"id {int(ids.max())} is not in its vocabulary"
    text = own.decode(ids)
    if of_model.decode(ids) != text:
        for token in dict.fromkeys(ids.tolist()):
            if (one := own.decode([token])) != (other := of_model.decode([token])):
                return f"id {token} is {one!r} in the corpus, and {other!r} in the model"
        return "the same ids give another text"
    if not np.array_equal(own.encode(text), of_model.encode(text)):
        return "the same text gives other ids"
    if corpus.eot_id is not None and corpus.eot_id != of_model.eot_id:
        return f"a text ends with id {corpus.eot_id} in the corpus, and with {of_model.eot_id} in the model"
    return None
