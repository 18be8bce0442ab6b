"""Measures a machine (`hardware`) and works out what a model costs to run (`model`). Facts for the planner."""
