"""Recipes: the schema of all settings, and how YAML files and command line become one."""

from megarl.errors import RecipeError
from megarl.recipe.load import to_yaml
from megarl.recipe.schema import Recipe

__all__ = ["Recipe", "RecipeError", "to_yaml"]
