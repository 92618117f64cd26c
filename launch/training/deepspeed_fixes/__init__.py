"""What is changed in DeepSpeed's and torch's functions, where they are wrong or slow. `corrections.py` lists it, with its probes.

Three are not listed but called where they are needed, before an engine is initialized: `half_products.py`, and `load_extension` and
`skip_extension_of_cpu_ranks` in `start_up.py`. `norms.py`, `mean_norm.py` and `probe_engine.py` help several corrections. To add one:

1. Write its probe and its correction in the module of their subject, and list the pair in `corrections.py`.
2. Name it in `CORRECTIONS` of `tests/distributed/correction_jobs.py`, with a job that shows the fault; test it in `test_corrections.py`.
   What it replaces in a class also goes into `remember_engine_as_shipped` there.
3. Add a row to `docs/deepspeed-faults.md`.
"""
