"""Memory of each device and host."""
