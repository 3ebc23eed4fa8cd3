"""Your own classifier: from a model and images to a recipe with every setting chosen, for `qualms fit` and `qualms.fit`."""
