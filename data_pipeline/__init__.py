"""From text to batches: sources, tokenizers, token shards, the global sample order and the loader."""
