"""Commands. Neither the loop (`train.py`) nor a process that it starts imports this folder."""
