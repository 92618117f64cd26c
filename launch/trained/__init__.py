"""What was trained, as a model again: read from a run's checkpoint or a Hugging Face folder, written as one."""
