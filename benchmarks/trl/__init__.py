"""Parts of benchmarks/against_trl.py: the job, TRL's side, the measurement of a process tree, figures and table."""
