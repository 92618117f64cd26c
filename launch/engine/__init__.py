"""The DeepSpeed engine: initialisation, corrections, and the one place that touches torch.distributed."""
