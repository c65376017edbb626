"""`megarl compare A B`: compare the curves and the speed of two runs."""
