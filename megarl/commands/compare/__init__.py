"""`megarl compare A B`: curves and speed of two runs."""
