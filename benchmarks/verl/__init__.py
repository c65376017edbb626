"""Parts of benchmarks/against_verl.py: what verl lacks to run on a CPU, and the options of its command."""
