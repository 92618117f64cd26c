"""Checkpoints: written, read, moved to another layout, branched from, stored elsewhere."""
