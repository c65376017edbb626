"""Where scorers run: in processes that may hang, crash and be killed without harm to anything but their sample."""
