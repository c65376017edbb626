"""Several nodes: `python -m megarl.cluster.launch.multinode` starts Ray on each and runs the command on the first."""
