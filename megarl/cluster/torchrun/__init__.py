"""One machine under torchrun: rank 0 is the controller, without Ray."""
