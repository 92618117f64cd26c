"""The files that runs leave and read: configuration, metrics, checkpoints, weights, and Hugging Face folders."""
