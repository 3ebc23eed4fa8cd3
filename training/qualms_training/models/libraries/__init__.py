"""Networks from other libraries and from the user's own modules: their constructors, weights and input."""
