"""Methods that train a whole network of their own."""
