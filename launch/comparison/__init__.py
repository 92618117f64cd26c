"""Runs compared as controlled experiments: missing runs, statistics, the report."""
