"""Benchmarks of training, checkpoints, data preparation and start-up; most interleave what they compare."""
