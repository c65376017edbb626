"""`megarl engines`: list the engines of a live run, and change their number."""
