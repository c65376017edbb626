"""Trainers and engines as Ray actors. Outside this folder, only `commands/run_on_all_nodes.py` and `commands/launch/` import Ray."""
