"""A trained model: read from a checkpoint or a Hugging Face folder, to be exported, scored or sampled from."""
