"""The tokenizers of a Hugging Face folder and of a corpus, and whether they are the same."""

from __future__ import annotations

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.shards import Corpus
from data_pipeline.tokenizer import HuggingFace, Tokenizer
from launch.formats.hf_folder import HFFolder

#: Ids of the corpus on which two tokenizers are compared.
COMPARED_IDS = 4096


def tokenizer_of_folder(hf: HFFolder) -> tuple[Tokenizer | None, str]:
    """The folder's tokenizer, or None and the reason."""
    if not hf.has_tokenizer:
        return None, f"{hf.folder} holds no tokenizer"
    try:
        return HuggingFace.read(hf.folder, None, str(hf.folder)), ""
    except DataError as reason:
        return None, str(reason)


def tokenizer_of_corpus(corpus: Corpus) -> tuple[Tokenizer | None, str]:
    """The corpus's tokenizer, or None and the reason."""
    try:
        return Tokenizer.load(corpus.path, corpus.manifest["tokenizer"]), ""
    except DataError as reason:
        return None, str(reason)


def difference(corpus: Corpus, own: Tokenizer, of_model: Tokenizer) -> str | None:
    """The first difference of two tokenizers on the beginning of a corpus's validation text, one line, or None."""
    count = min(COMPARED_IDS, corpus.val.windows(1))
    ids = corpus.val.read(np.arange(count), 1)[:, 0]
    ids = ids[ids != corpus.eot_id] if corpus.eot_id is not None else ids
    if ids.size and int(ids.max()) >= of_model.vocab_size:
        return f"id {int(ids.max())} is not in its vocabulary"
    text = own.decode(ids)
    if of_model.decode(ids) != text:
        return "the same ids decode to another text"
    if not np.array_equal(own.encode(text), of_model.encode(text)):
        return "the same text is encoded to other ids"
    if corpus.eot_id is not None and corpus.eot_id != (end := getattr(of_model, "eot_id", None)):
        return f"a text ends with id {corpus.eot_id} in the corpus, but with {end} in the model"
    return None
