"""One module per stage, each with a `run(context)`."""
