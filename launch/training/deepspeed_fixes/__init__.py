"""Every repair of DeepSpeed, and of torch under it, of what is wrong or slow: probes and patches alone. `corrections.py` lists them.

Three are called where they are needed, before an engine is initialized: `half_products.py`, and `load_extension` and
`skip_extension_of_cpu_ranks` in `start_up.py`. `norms.py`, `mean_norm.py` and `probe_engine.py` help several corrections. To add one, write
its probe and its correction, list the pair in `corrections.py`, and show both in `tests/distributed/test_corrections.py`.
"""
