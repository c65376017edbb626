"""Tables of model families in files (`model.table`), for model types that megarl has no table of its own for. Pure."""
