"""`megarl keys`: the settings of a recipe, described."""
