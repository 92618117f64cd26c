"""Tests that start real ranks through the real engine."""
