"""The commands (`launch/*.py`) and their parts.

Imports run one way: commands -> comparison, trained_model -> training -> config -> formats -> errors.
"""
