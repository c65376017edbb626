"""Recipes: the schema of all settings, and how YAML files and command line become one."""

from megarl.errors import RecipeError
from megarl.recipe.schema import Recipe
from megarl.recipe.text import to_yaml

__all__ = ["Recipe", "RecipeError", "to_yaml"]
