"""``python -m megarl rehearse``: train a tiny copy of a recipe and its model on two CPU cores."""
