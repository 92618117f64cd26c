"""Runs as controlled experiments: running what is missing, reading run folders, statistics, and the report."""
