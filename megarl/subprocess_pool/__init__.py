"""A pool of processes for scorers and tools. A call that hangs or crashes fails alone; its process is replaced."""
