"""Tables of model families in files (`model.table`), for model types without a built-in table. Pure."""
