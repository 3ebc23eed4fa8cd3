"""Parse the body of a prediction into images: files, forms, and JSON."""
