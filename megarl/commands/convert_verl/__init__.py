"""`megarl convert-config`: verl's scripts and command lines become recipes.

table.py carries one option to one key, translate.py several options together.
"""
