"""The commands people run (`launch/*.py`) and their parts (`launch/run`, `launch/engine`)."""
