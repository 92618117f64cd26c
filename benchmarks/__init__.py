"""Benchmarks: each compares two things that take turns in one run, and reports medians, spread and their ratio."""
