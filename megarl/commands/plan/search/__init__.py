"""Search for layouts that fit, fastest first."""
