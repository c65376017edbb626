"""Launch a run on several nodes: `python -m megarl.commands.launch.multinode` on each node."""
