"""Recipes: the schema (schema.py, training.py), how YAML becomes one (load.py), and what is refused (validate.py)."""

from megarl.errors import RecipeError
from megarl.recipe.load import load_recipe, to_yaml
from megarl.recipe.schema import Recipe

__all__ = ["Recipe", "RecipeError", "load_recipe", "to_yaml"]
