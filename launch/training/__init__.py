"""A training run: the DeepSpeed engine and its corrections, the other ranks, the run folder, checkpoints, measurements."""
