"""Every fault of DeepSpeed that a run meets, as a probe and a patch, and what replaces its slow or missing parts."""
