"""Several nodes: `python -m megarl.commands.launch.multinode` starts Ray on each and runs the command on the first."""
