"""Trainers and engines as Ray actors."""
