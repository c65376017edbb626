"""Values and views that follow from several recipe keys. Pure functions of a recipe."""
