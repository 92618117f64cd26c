"""The folder of a run and all that is written to it."""
