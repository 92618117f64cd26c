"""The other ranks: the process group, signals, heartbeats, turns with other runs."""
